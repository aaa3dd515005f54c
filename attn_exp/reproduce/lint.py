"""Find published figures that are impossible, or that contradict each other."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attn_exp.core.flops import flops
from attn_exp.core.text import figures as figures_text
from attn_exp.reproduce.figures import Figure

Kind = Literal["impossible", "misfit", "contradiction", "mask"]
# Times and rates of one figure are rounded to three digits or more.
_MISFIT = math.log1p(0.03)
# Two figures of one configuration, and a causal rate beyond that of full attention: half the work takes a bit more than
# half the time, as tiles on the diagonal are half wasted.
_APART = math.log1p(0.10)
# From here on a kernel's rate depends little on batch and heads: 8 waves of tiles of 128 queries on 132 SMs, and
# lengths that differ by at most a factor of 2.
_LONG, _TILES, _LENGTHS = 8192, 8 * 132, 2
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Finding:
    """Figures that cannot all be true, and why; `others` counts further pairs of the same sources and kind."""

    kind: Kind
    figures: tuple[Figure, ...]
    said: str
    others: int = 0

    def __str__(self) -> str:
        more = f" ({self.others} more such pairs)" if self.others else ""
        return f"{self.kind}: {', '.join(one.name for one in self.figures)}: {self.said}{more}"


def lint(figures: Sequence[Figure]) -> list[Finding]:
    """Return what is wrong with the figures: impossible ones, misfits of time and rate, contradictions."""
    single = [found for figure in figures for found in (*_impossible(figure), *_misfit(figure))]
    impossible = {found.figures[0].name for found in single if found.kind == "impossible"}
    usable = [one for one in figures if one.name not in impossible]
    return [*single, *_same_configuration(usable), *_saturated(usable), *_causal_beats_full(usable)]


def rate(figure: Figure) -> float:
    """Return the figure's rate in TFLOPS, with the pairs counted that the mask leaves."""
    return flops(figure.case, figure.direction) / figure.us / 1e6


def _impossible(figure: Figure) -> list[Finding]:
    """Return that a figure's rate is above the GPU's peak, by its rate or by its time."""
    peak = figure.source.chip
    limit = None if peak is None else peak.flops_limit(figure.case.dtype)
    by_time = 0.0 if figure.time_us is None else flops(figure.case, figure.direction) / figure.time_us / 1e6
    highest = max(figure.tflops or 0.0, rate(figure), by_time)
    if peak is None or limit is None or highest * 1e12 <= limit:
        return []
    said = f"{figures_text(highest)} TFLOPS are more than the {figures_text(limit / 1e12)} of an {peak.name}"
    return [Finding("impossible", (figure,), said)]


def _misfit(figure: Figure) -> list[Finding]:
    """Return that a figure's rate is not its FLOPs by its time."""
    if figure.tflops is None or figure.time_us is None:
        return []
    by_time = figure.counted / figure.time_us / 1e6
    if abs(math.log(by_time / figure.tflops)) <= _MISFIT:
        return []
    said = f"{figures_text(figure.tflops)} TFLOPS, but its time makes {figures_text(by_time)}"
    return [Finding("misfit", (figure,), said)]


def _kind_of(figure: Figure) -> tuple[Any, ...]:
    """Return what figures of one kernel on one GPU share, but for its version, which most sources leave out."""
    chip = figure.source.chip
    dtype = "half" if figure.case.dtype in _HALVES else figure.case.dtype
    gpu = figure.source.gpu if chip is None else chip.name
    return figure.library, dtype, figure.direction, figure.deterministic, gpu


def _same_configuration(figures: Sequence[Figure]) -> list[Finding]:
    """Return the pairs of figures of one configuration that are too far apart."""
    pairs = _pairs(figures, lambda one: (_kind_of(one), replace(one.case, layout="bhsd", dtype="float16")))
    return _apart(pairs, "one configuration")


def _saturated(figures: Sequence[Figure]) -> list[Finding]:
    """Return the pairs that differ in batch, heads or length, all so large that the rate hardly depends on them."""
    large = [
        one
        for one in figures
        if one.case.square
        and one.case.q_len >= _LONG
        and one.case.batch * one.case.q_heads * one.case.q_len >= 128 * _TILES
    ]

    def key(one: Figure) -> Any:
        case = one.case
        return _kind_of(one), case.head_dim, case.value_dim, case.causal, case.window

    pairs = [
        (one, other)
        for one, other in _pairs(large, key)
        if one.source != other.source
        and max(one.case.q_len, other.case.q_len) <= _LENGTHS * min(one.case.q_len, other.case.q_len)
        and (one.case.q_len, one.case.batch, one.case.q_heads)
        != (other.case.q_len, other.case.batch, other.case.q_heads)
    ]
    return _apart(pairs, "both fill the GPU")


def _causal_beats_full(figures: Sequence[Figure]) -> list[Finding]:
    """Return the pairs of one source in which a causal mask raises the rate."""
    plain, pairs = [one for one in figures if one.case.window is None], []
    for full, causal in _pairs(plain, lambda one: (one.source, _kind_of(one), replace(one.case, causal=False))):
        if full.case.causal:
            full, causal = causal, full
        if not full.case.causal and causal.case.causal and math.log(rate(causal) / rate(full)) > _APART:
            pairs.append((full, causal))
    return _worst("mask", pairs, "a causal mask raises the rate")


def _pairs(figures: Iterable[Figure], key: Any) -> list[tuple[Figure, Figure]]:
    groups: dict[Any, list[Figure]] = {}
    for figure in figures:
        groups.setdefault(key(figure), []).append(figure)
    return [pair for group in groups.values() for pair in itertools.combinations(group, 2)]


def _apart(pairs: Iterable[tuple[Figure, Figure]], said: str) -> list[Finding]:
    far = [(a, b) for a, b in pairs if _distance((a, b)) > _APART + a.source.reading + b.source.reading]
    return _worst("contradiction", far, said)


def _distance(pair: tuple[Figure, Figure]) -> float:
    return abs(math.log(rate(pair[0]) / rate(pair[1])))


def _worst(kind: Kind, pairs: Iterable[tuple[Figure, Figure]], said: str) -> list[Finding]:
    """Return one finding for each two sources, library and mask: the pair that is farthest apart."""
    groups: dict[Any, list[tuple[Figure, Figure]]] = {}
    for a, b in pairs:
        key = a.source.name, b.source.name, a.library, a.direction, a.case.causal, a.case.head_dim
        groups.setdefault(key, []).append((a, b))
    found = []
    for group in groups.values():
        a, b = max(group, key=_distance)
        rates = f"{figures_text(rate(a))} and {figures_text(rate(b))} TFLOPS"
        found.append(Finding(kind, (a, b), f"{rates}: {said}", len(group) - 1))
    return found
