"""Other jobs on the same case, measured in the same way on the same kind of machine."""

import re
from collections.abc import Iterable, Sequence

from attn_exp.compare.answer import spreads_for
from attn_exp.compare.join import method_key
from attn_exp.compare.ratio import ratio
from attn_exp.core.flags import flag_marks
from attn_exp.core.multiple_tests import worse_than_best
from attn_exp.core.text import SHORT, figures
from attn_exp.results.cell import ChosenMetric, cells_of
from attn_exp.results.result import Result, named


def rivals_of(job: Result, results: Iterable[Result], direction: str) -> list[Result]:
    """Return the ok results of one pass on a job's case, the fastest first, with unique labels."""
    key = f"{direction}/time_us"
    same = [
        one
        for one in results
        if one.status == "ok"
        and key in one.metrics
        and (one.case, method_key(one), one.device_name) == (job.case, method_key(job), job.device_name)
    ]
    return sorted(named(same), key=lambda one: one.metrics[key])


def against_fastest(job: Result, results: Iterable[Result], direction: str) -> list[str]:
    """Return sentences on how a job's pass compares with the fastest; none if there is no other job."""
    several = rivals_of(job, results, direction)
    own = next((one for one in several if one.path == job.path), None)
    if own is None or len(several) < 2:
        return []
    first = several[0]
    if first is own:
        other, slow = several[1], several[1]
        place = f"the fastest of {len(several)}; next is {_time(other, direction)}, which"
    else:
        other, slow = first, own
        at = [one.path for one in several].index(own.path) + 1
        place = f"{at} of {len(several)}; {_time(other, direction)} is the fastest, and this"
    times = slow.metrics[f"{direction}/time_us"] / first.metrics[f"{direction}/time_us"]
    sentence = f"{direction}: {place} takes {times:.3g} times as long{_doubt(several, slow, direction)}"
    return [sentence, *_kernels(own, other, direction)]


def _time(result: Result, direction: str) -> str:
    metrics = result.metrics
    rate = metrics.get(f"{direction}/tflops")
    more = f", {figures(rate)} TFLOPS" if rate else ""
    marks = flag_marks(result.flags)
    return f"{result.label} ({figures(metrics[f'{direction}/time_us'])} us{more}{', marks ' + marks if marks else ''})"


def _doubt(several: Sequence[Result], slow: Result, direction: str) -> str:
    """Return a remark if a job is tied with the fastest of several, as in a comparison of them all."""
    metric, spreads = ChosenMetric(direction=direction), spreads_for(several, None)
    first, *others = cells_of(several, metric)
    ratios = (ratio(cell, first, metric, spreads.between_rows(cell.result, first.result)) for cell in others)
    worse = worse_than_best([1.0 if one is None else one.p for one in ratios])
    if any(one for one, cell in zip(worse, others, strict=True) if cell.result is slow):
        return ""
    return f": within their intervals, too close to call (attn-exp duel decides {SHORT[direction]})"


def _kernels(own: Result, other: Result, direction: str) -> list[str]:
    mine, theirs = (one.longest_kernel(direction) for one in (own, other))
    if not mine or not theirs:
        return []
    what = kind(own)
    if mine == theirs:
        return [f"  both spend most of their time in the same {what}, {short(mine)}"]
    return [f"  this one's longest {what} is {short(mine)}", f"  {other.label}'s is {short(theirs)}"]


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
