"""Other jobs on the same case, measured in the same way on the same kind of machine."""

import re
from collections.abc import Iterable
from typing import Any

from attn_exp.comparison.answer import spreads_for
from attn_exp.comparison.join import method_key
from attn_exp.comparison.ranking import Ranking, ranked
from attn_exp.comparison.settled import Settlements
from attn_exp.core.record.flags import flag_marks
from attn_exp.core.text import figures
from attn_exp.results.cell import ChosenMetric, attends, cells_of
from attn_exp.results.result import Result, named


def ground(result: Result) -> tuple[Any, ...]:
    """Return what jobs share that are compared: the case, how it was measured, and the kind of machine."""
    return result.case, method_key(result), result.device_name


def against_fastest(job: Result, results: Iterable[Result], direction: str) -> list[str]:
    """Return sentences on how a job's pass compares with the fastest; none if there is no other job."""
    key = f"{direction}/time_us"
    same = [one for one in results if one.status == "ok" and key in one.metrics and ground(one) == ground(job)]
    several = sorted(named(same), key=lambda one: one.metrics[key])
    own = next((one for one in several if one.path == job.path), None)
    if own is None or len(several) < 2:
        return []
    metric, spreads = ChosenMetric(direction=direction), spreads_for(several, None)
    rows = ranked(cells_of(several, metric), 0, metric, spreads, None, Settlements())
    rows.sort(key=lambda row: row.place)
    me = next(row for row in rows if row.cell.result is own)
    if not me.cell.compared or any(row.may_win for row in rows):
        return [f"{direction}: not measured well enough to be compared"]
    rows = [row for row in rows if row.cell.compared]
    if len(rows) < 2:
        return []
    at, other = 1 + rows.index(me), rows[0] if rows[0] is not me else rows[1]
    slow, fast = (me, other) if at > 1 else (other, me)
    times = slow.cell.result.metrics[key] / fast.cell.result.metrics[key]
    tie = ": too close to call (attn-exp duel decides)" if me.best and other.best and other.label not in me.same else ""
    said = _time(other.cell.result, direction)
    if at > 1:
        place = f"{at} of {len(rows)}; {said} is the fastest, and this"
    else:
        place = f"the fastest of {len(rows)}; next is {said}, which"
    if other.label in me.same:
        return [f"{direction}: as fast as {said}", *_kernels(me, other, direction)]
    sentence = f"{direction}: {place} takes {times:.3g} times as long{tie}"
    return [sentence, *_kernels(me, other, direction)]


def _time(result: Result, direction: str) -> str:
    metrics = result.metrics
    rate = metrics.get(f"{direction}/tflops")
    more = f", {figures(rate)} TFLOPS" if rate else ""
    marks = flag_marks(result.flags)
    return f"{result.label} ({figures(metrics[f'{direction}/time_us'])} us{more}{', marks ' + marks if marks else ''})"


def _kernels(row: Ranking, over: Ranking, direction: str) -> list[str]:
    own, other = row.cell.result, over.cell.result
    if not own.kernels.get(direction) or not other.kernels.get(direction):
        return []
    what = kind(own)
    mine, theirs = (main_kernel(one, direction) for one in (own, other))
    if over.label in row.kernel:
        agree = ", and their intervals agree" * (over.label in row.same)
        return [f"  same kernel: both run {short(mine, 68)}{agree}"]
    if mine == theirs:
        # A CPU's longest operator may be one wrapper around different implementations.
        return [f"  both spend most of their time in the same kernel, {short(mine)}"] if what == "kernel" else []
    which = "longest" if what == "kernel" else "main"
    return [f"  this one's {which} {what} is {short(mine)}", f"  {other.label}'s is {short(theirs)}"]


def main_kernel(result: Result, direction: str) -> str:
    """Return the name of the longest kernel, of a CPU the operator that computes attention."""
    names = result.kernels[direction]
    return next((name for name in names if attends(name)), names[0]) if result.device == "cpu" else names[0]


def kind(result: Result) -> str:
    """Return what a record's `kernels` are on its device: kernels, or a CPU's operators."""
    return "kernel" if result.device == "cuda" else "operator"


def _unmangled(name: str) -> str:
    """Return `a::b` for `_ZN1a1bI...` and `b` for `_Z1bPf`; any other name unchanged.

    These are nested names of the Itanium C++ ABI (section 5.1.2): lengths and identifiers. Proton reports kernels by
    them.
    """
    rest = name.removeprefix("_ZN") if name.startswith("_ZN") else name.removeprefix("_Z")
    parts: list[str] = []
    while rest != name and (size := re.match(r"\d+", rest)):
        end = size.end() + int(size[0])
        parts.append(rest[size.end() : end])
        rest = rest[end:]
        if not name.startswith("_ZN"):
            break
    return "::".join(parts) or name


def short(name: str, width: int = 72) -> str:
    """Return a kernel's name without its C++ arguments, shortened in the middle if it is too long."""
    text = _unmangled(name.removeprefix("void ").split("(")[0] or name)
    if len(text) <= width:
        return text
    half = (width - 3) // 2
    return f"{text[: width - 3 - half]}...{text[-half:]}"
