"""The fewest rules that say which label is among the best, for cases with features: a decision tree without noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_exp.results.fields import distinct, sortable


@dataclass(frozen=True, slots=True)
class Example:
    """One case with its features, the labels that are among the best in it, and those in doubt that may be.

    A case without a best is undecided; all such cases have a label in common among their `perhaps`.
    """

    features: Mapping[str, Any]
    best: frozenset[str]
    perhaps: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Part:
    """Examples (by index) that have a label in common among their best, and the values that single them out.

    `coinciding` has, for a feature of `where`, the others whose values separate the same examples: which of them is the
    reason, the examples cannot tell.
    """

    indices: tuple[int, ...]
    best: frozenset[str]
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    coinciding: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)


def fewest(examples: Sequence[Example]) -> list[Part]:
    """Return a partition of the examples into few parts, each with a label that is among the best in all of it.

    A part is singled out by values of features: ranges of numbers, or some of several words. Where no label is the best
    everywhere, the feature is split whose parts need the fewest labels, and then each part that needs more than one.
    """
    return _split(examples, Part(tuple(range(len(examples))), frozenset()))


def _split(examples: Sequence[Example], whole: Part) -> list[Part]:
    indices = whole.indices
    common = _common(examples, indices)
    if common or len(indices) < 2:
        return [replace(whole, best=common)] if indices else []
    names = list(examples[indices[0]].features)
    splits = [(name, _runs(examples, indices, name)) for name in names]
    splits = [(name, runs) for name, runs in splits if len(runs) > 1]
    if not splits:
        # Nothing tells them apart: each speaks for itself.
        return [replace(whole, indices=(index,), best=examples[index].best) for index in indices]

    def rules_left(split: tuple[str, list[tuple[tuple[Any, ...], list[int]]]]) -> tuple[int, int]:
        """Return how many labels the parts need, and then how many parts have to be split again."""
        needed = [_labels_needed(examples, part) for _, part in split[1]]
        return sum(needed), sum(one > 1 for one in needed)

    name, runs = min(splits, key=rules_left)
    return [
        one
        for values, part in runs
        for one in _split(
            examples,
            replace(
                whole,
                indices=tuple(part),
                where={**whole.where, name: values},
                coinciding={**whole.coinciding, name: _coinciding(examples, indices, part, name)},
            ),
        )
    ]


def _coinciding(
    examples: Sequence[Example], indices: Sequence[int], part: Sequence[int], name: str
) -> dict[str, tuple[Any, ...]]:
    """Return the features but `name` whose values in `part` none of the other `indices` has, with these values."""
    found, own = {}, set(part)
    for other in examples[indices[0]].features:
        inside = distinct(examples[at].features[other] for at in part)
        outside = {repr(examples[at].features[other]) for at in indices if at not in own}
        if other != name and not outside.intersection(map(repr, inside)):
            found[other] = tuple(sorted(inside, key=sortable))
    return found


def _common(examples: Sequence[Example], indices: Sequence[int]) -> frozenset[str]:
    """Return the labels that are among the best in all examples.

    Without one, that which is in most of them, and may be in all others: a tree that followed the noise of rows in
    doubt would name features that have nothing to do with it. Of undecided examples only, what may be in each.
    """
    if not indices:
        return frozenset()
    if sure := frozenset.intersection(*(examples[index].best for index in indices)):
        return sure
    looks = frozenset.intersection(*(examples[index].best | examples[index].perhaps for index in indices))
    if not any(examples[index].best for index in indices):
        return looks
    sure_in = {one: sum(one in examples[at].best for at in indices) for one in looks}
    most = max(sorted(looks), key=lambda one: sure_in[one], default=None)
    return frozenset() if most is None or 2 * sure_in[most] <= len(indices) else frozenset((most,))


def _runs(examples: Sequence[Example], indices: Sequence[int], name: str) -> list[tuple[tuple[Any, ...], list[int]]]:
    """Return the parts into which a feature splits: its values, joined as long as one label is best in all of a part.

    Numbers are joined with their neighbours only. So are values of which each needs several labels, unless all do.
    """
    values = sorted(distinct(examples[index].features[name] for index in indices), key=sortable)
    of = {repr(value): [at for at in indices if repr(examples[at].features[name]) == repr(value)] for value in values}
    ordered = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    runs: list[tuple[list[Any], list[int]]] = []
    for value in values:
        own = of[repr(value)]
        for joined, part in reversed(runs) if not ordered else runs[-1:]:
            if _common(examples, [*part, *own]) or not (_common(examples, part) or _common(examples, own)):
                joined.append(value)
                part += own
                break
        else:
            runs.append(([value], list(own)))
    if len(runs) == 1:
        runs = [([value], of[repr(value)]) for value in values]
    return [(tuple(joined), part) for joined, part in runs]


def _labels_needed(examples: Sequence[Example], indices: Sequence[int]) -> int:
    """Return how many labels, the most frequent first, it takes until each example has one of them among its best."""
    left, needed = list(indices), 0
    while left:
        counts: dict[str, int] = {}
        for index in left:
            for label in examples[index].best | examples[index].perhaps:
                counts[label] = counts.get(label, 0) + 1
        if not counts:
            break
        most = max(counts, key=lambda label: counts[label])
        left = [index for index in left if most not in examples[index].best | examples[index].perhaps]
        needed += 1
    return needed
