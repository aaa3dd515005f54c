"""Comparisons of results that should have the same bits: over calls, positions and batch sizes."""

from collections.abc import Mapping
from dataclasses import dataclass

# The changes between compared results, in the order in which they are measured and reported.
WAYS = {"calls": "over calls", "positions": "over positions in the batch", "batch_sizes": "over batch sizes"}
# Calls of each pass on the same inputs, and the seconds after which no further result of a job is compared.
CALLS, BUDGET_S = 100, 120.0
# The ways that make a backend batch-invariant.
OF_THE_BATCH = ("positions", "batch_sizes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first element whose bits differ between two results of one tensor; `value` and `usual` have their bits.

    Of the tensor's `elements_of` elements `elements` differ; `max_abs` is the largest difference, None if not finite.
    """

    result: str
    tensor: str
    index: tuple[int, ...]
    value: str
    usual: str
    elements: int
    elements_of: int
    max_abs: float | None

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        by = "" if self.max_abs is None else f", by {self.max_abs:.3g} at most"
        return (
            f"{self.result}: {self.tensor}[{place}] is {self.value} and not {self.usual}; "
            f"{self.elements:,} of {self.elements_of:,} elements differ{by}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bitwise:
    """Whether results of one pass have the same bits as the first one: of `compared` results, `differing` have not.

    `same` is None if it is not known, as where no other batch fits into the memory; `why` then says the reason.
    """

    same: bool | None
    compared: int = 0
    differing: int = 0
    first: Difference | None = None
    why: str | None = None

    @property
    def word(self) -> str:
        """Return `yes`, `no` or `not known`."""
        return "not known" if self.same is None else yes_or_no(self.same)

    def __str__(self) -> str:
        if self.first is not None:
            return f"{self.word} ({self.differing:,} of {self.compared:,} differ; {self.first})"
        return f"{self.word} ({self.why})" if self.why else f"{self.word} ({self.compared:,} compared)"


def yes_or_no(value: float) -> str:
    """Return the word for a fact."""
    return "yes" if value else "no"


def holds(known: Mapping[str, Bitwise], *ways: str) -> float | None:
    """Return 1.0 if results have the same bits in all of these ways that were measured, 0.0 if in one they do not.

    None if none of them was measured, or one is not known and the others hold.
    """
    facts = [known[way].same for way in ways if way in known]
    if False in facts:
        return 0.0
    return None if not facts or None in facts else 1.0


def told(known: Mapping[str, Bitwise]) -> str:
    """Return all facts of a pass in words, in the order of `WAYS`."""
    return "; ".join(f"{words} {known[way]}" for way, words in WAYS.items() if way in known)
