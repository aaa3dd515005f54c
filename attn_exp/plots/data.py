"""Data of charts: selections, families of curves, names of cases, and captions."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.comparison.join import method_key
from attn_exp.core.case.case import PASSES, TYPED_DTYPES, Case
from attn_exp.core.case.features import FEATURES, PAGES
from attn_exp.core.case.fields import case_columns, typed_lengths
from attn_exp.core.source import short

if TYPE_CHECKING:
    from attn_exp.results.result import Result


def measured(results: Iterable["Result"], *metrics: str) -> "list[Result]":
    """Return the ok results that have each of these metrics in some pass."""
    return [
        result
        for result in results
        if result.status == "ok" and any(all(f"{side}/{name}" in result.metrics for name in metrics) for side in PASSES)
    ]


def passes_of(results: "Sequence[Result]", metric: str) -> list[str]:
    """Return the passes in which any result has a metric."""
    return [side for side in PASSES if any(f"{side}/{metric}" in result.metrics for result in results)]


def length(case: Case) -> int:
    """Return the longer of the two lengths, which comparisons call `seq_len`."""
    return max(case.q_len, case.kv_len)


def family(result: "Result") -> tuple[Any, ...]:
    """Return what results on one curve over length share: all sizes but the lengths, the model, the method."""
    case = result.case
    sizes = [getattr(case, name) for name in case_columns() if name not in ("q_len", "kv_len", "lengths", "kv_lengths")]
    # In a decoding step only the keys grow.
    shape = "square" if case.square else ("q_len", case.q_len) if case.q_len < case.kv_len else ("kv_len", case.kv_len)
    way = result.measuring
    return (
        *sizes,
        shape,
        result.model,
        result.device_name,
        way.timer,
        way.regime,
        way.inputs,
        way.accumulate,
        result.l2,
    )


def families(results: "Iterable[Result]") -> "list[list[Result]]":
    """Group the results into families with at least two lengths, those with the most lengths first."""
    by_family: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        if result.case.lengths is None:
            by_family[family(result)].append(result)
    several = [one for one in by_family.values() if len({length(result.case) for result in one}) > 1]
    return sorted(several, key=lambda one: -len({length(result.case) for result in one}))


def case_names(results: "Sequence[Result]", leave_out: Sequence[str] = ()) -> "Callable[[Result], str]":
    """Return a function that names a case briefly, by the sizes in which these results differ."""
    varying = [
        name
        for name in case_columns()
        if name not in leave_out and len({repr(getattr(result.case, name)) for result in results}) > 1
    ]
    if "q_len" in varying and "kv_len" in varying and all(result.case.square for result in results):
        varying.remove("kv_len")
    others = [get for get in _BESIDE if "model" not in leave_out and len({get(result) for result in results}) > 1]

    def name_of(result: "Result") -> str:
        words = [_word(name, getattr(result.case, name), result.case) for name in varying]
        return " ".join(filter(None, [*(get(result) for get in others), *words]))

    return name_of


def shared_case(results: "Sequence[Result]", leave_out: Sequence[str] = ()) -> str:
    """Return the sizes that all results share, for a caption."""
    first = results[0].case
    same = [
        name
        for name in case_columns()
        if name not in leave_out and len({repr(getattr(result.case, name)) for result in results}) == 1
    ]
    words = [_word(name, getattr(first, name), first) for name in same if getattr(first, name) is not None]
    return " ".join(word for word in words if word)


def one_each(results: "Iterable[Result]") -> "list[Result]":
    """Return the latest result of each job identity."""
    kept: dict[Any, Result] = {}
    for result in results:
        key = (result.key, short(result.source), method_key(result), result.device_name)
        if key not in kept or kept[key].finished_at <= result.finished_at:
            kept[key] = result
    return list(kept.values())


def caption(results: "Sequence[Result]", *sentences: str) -> str:
    """Return a caption: what the chart shows, of how many jobs, where and when they were measured."""
    devices = sorted({result.device_name for result in results} - {""})
    ended = sorted(time.strftime("%Y-%m-%d", time.gmtime(r.finished_at)) for r in results if r.finished_at)
    days = [] if not ended else [ended[0]] if ended[0] == ended[-1] else [f"{ended[0]} to {ended[-1]}"]
    timers = sorted({f"timer {result.measuring.timer}" for result in results})
    where = ", ".join([f"n = {len(results)} jobs", *devices, *timers, *days])
    return " ".join([*(sentence for sentence in sentences if sentence), f"{where}."])


def size_text(value: float) -> str:
    """Format a length briefly: `512`, `4k`, `1M`."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


# Besides sizes, these distinguish two curves of one backend.
_BESIDE: "tuple[Callable[[Result], str], ...]" = (
    lambda result: result.model,
    lambda result: result.device_name,
    lambda result: result.measuring.timer,
)
# Letters of packed sequences in a name.
_LONGEST = 24
_SHORT_NAMES = {"batch": "b", "q_heads": "h", "kv_heads": "kvh", "q_len": "s", "kv_len": "kv", "head_dim": "d"}


def _word(name: str, value: Any, case: Case) -> str:
    if name == "causal":
        return "causal" if value else "full"
    if name == "kv_heads" and value == case.q_heads:
        return ""
    if name in _SHORT_NAMES:
        short = "q" if name == "q_len" and not case.square else _SHORT_NAMES[name]
        return f"{short}{value}"
    if name in ("dtype", "align", "layout"):
        typed = str(TYPED_DTYPES.get(value, value))
        return typed if name == "dtype" or (name == "align" and not case.square) or value == "bshd" else ""
    if name == "value_dim":
        return "" if value == case.head_dim else f"dv{value}"
    if name in ("lengths", "kv_lengths"):
        # Its requests, with the keys that they have.
        text = "" if name == "kv_lengths" or value is None else typed_lengths(value, case.kv_lengths)
        return text if len(text) <= _LONGEST else f"{len(value)} requests"
    if name in FEATURES:
        return FEATURES[name].label.format(value) if value and value != PAGES[0] else ""
    return "" if value is None else f"{name} {value}"
