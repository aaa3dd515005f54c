"""Rivals: the backends of a sweep beside each other, case by case and pass by pass."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_exp.compare.cell import Cell, Metric
from attn_exp.compare.comparison import Comparison, about
from attn_exp.compare.duels import Duel, duels
from attn_exp.compare.grouping import latest, rivals_of
from attn_exp.compare.means import Mean, means
from attn_exp.compare.picks import Pick, picks
from attn_exp.compare.ratio import Ratio, Spreads, ratio
from attn_exp.compare.read import Sweep
from attn_exp.compare.result import Result
from attn_exp.compare.standing import Standing
from attn_exp.errors import UserError, nearest

# In what rows of one sweep may be unlike, so that they do not stand in one group.
_UNLIKE: dict[str, Callable[[Result], str]] = {
    "devices": lambda result: result.device_name,
    "power limits": lambda result: str(result.environment.get("power_limit_w")),
    "timers": lambda result: result.measuring.timer,
    "regimes": lambda result: result.measuring.regime,
    "methods": lambda result: result.method_version,
    "states of the L2 cache": lambda result: result.l2,
}

# Of those, what `by=` calls them where one sweep may choose several.
_WAYS: dict[str, Callable[[Result], str]] = {
    "device": lambda result: result.device,
    "timer": _UNLIKE["timers"],
    "regime": _UNLIKE["regimes"],
    "l2": lambda result: result.measuring.l2,
}


@dataclass(frozen=True, kw_only=True)
class Rivals(Comparison):
    """A sweep's backends beside each other.

    `rows` stand in groups of one case and pass, cases in the order of their sizes. `ties` are the best two of each
    group that cannot be told apart, with the duel that would decide.
    """

    baseline: str | None
    rows: tuple[Standing, ...]
    means: tuple[Mean, ...]
    by: tuple[str, ...]
    picks: tuple[Pick, ...]
    ties: tuple[Duel, ...]


def compare_rivals(
    sweeps: Sequence[Sweep],
    cells: Sequence[Cell],
    metric: Metric,
    spreads: Spreads,
    *,
    baseline: str | None = None,
    by: tuple[str, ...] = (),
    notes: Sequence[str] = (),
) -> Rivals:
    """Compare the backends of one or several sweeps, by the cells that were chosen of them.

    Raises:
        UserError: no such baseline.
    """
    labels = sorted({cell.result.label for cell in cells})
    if baseline is not None and not any(_is(label, baseline) for label in labels):
        raise UserError(
            f"there is no baseline={baseline}: {nearest(baseline, labels)}the backends are {', '.join(labels)}"
        )
    cells, repeated = latest(cells)
    groups = rivals_of(cells)
    # No mean over what is never compared.
    ways = {name: {get(cell.result) for cell in cells} for name, get in _WAYS.items() if name not in by}
    by = (*by, *(name for name, seen in ways.items() if len(seen) > 1))
    rows = [row for index, group in enumerate(groups) for row in _standings(group, index, metric, spreads, baseline)]
    return Rivals(
        metric=metric,
        sweeps=tuple(about(sweep) for sweep in sweeps),
        broken=tuple(sentence for sweep in sweeps for sentence in sweep.broken),
        notes=(*notes, *repeated, *_mixed(groups)),
        baseline=baseline,
        rows=tuple(rows),
        means=means(rows, labels, by, baseline),
        by=by,
        picks=picks(rows, metric),
        ties=_ties(rows, metric),
    )


def _is(label: str, baseline: str) -> bool:
    """Whether a label is the baseline's; whose kernels a backend took, `auto (cudnn)`, need not be typed."""
    return label == baseline or label.startswith(f"{baseline} (")


def _standings(
    group: Sequence[Cell], index: int, metric: Metric, spreads: Spreads, baseline: str | None
) -> list[Standing]:
    valued = [cell for cell in group if cell.value is not None]
    best = min(valued, key=lambda cell: _rank(cell, metric), default=None)
    base = next((cell for cell in valued if _is(cell.result.label, baseline)), None) if baseline else best
    rows = []
    for cell in group:
        over = _gain(cell, base, metric, spreads)
        to_best = over if base is best else _gain(cell, best, metric, spreads)
        rows.append(Standing(cell, index, over, cell is best or (to_best is not None and not to_best.told)))
    return rows


def _gain(cell: Cell, over: Cell | None, metric: Metric, spreads: Spreads) -> Ratio | None:
    if over is None or cell.value is None:
        return None
    if cell is over:
        return Ratio(1.0, 1.0, 1.0, 0.0)
    return ratio(cell, over, metric, spreads.between_rows(cell.result, over.result))


def _rank(cell: Cell, metric: Metric) -> float:
    assert cell.value is not None
    return -cell.value if metric.more_is_better else cell.value


def _ties(rows: Sequence[Standing], metric: Metric) -> tuple[Duel, ...]:
    tied: dict[int, list[Standing]] = defaultdict(list)
    for row in rows:
        if row.best:
            tied[row.group].append(row)
    found = []
    for group in tied.values():
        if len(group) > 1:
            cells = sorted((row.cell for row in group), key=lambda cell: _rank(cell, metric))[:2]
            # In one order for both passes, so that one command can serve both.
            first, second = sorted(cells, key=lambda cell: (cell.result.label, cell.result.job))
            found.append((first, second))
    return duels(found)


def _mixed(groups: Sequence[Sequence[Cell]]) -> list[str]:
    """A sentence for each way in which a sweep's rows are unlike, which is why they do not all stand together."""
    results = {id(cell.result): cell.result for group in groups for cell in group if cell.result.status == "ok"}
    said = []
    for what, get in _UNLIKE.items():
        counts = Counter(get(result) for result in results.values())
        if len(counts) > 1:
            each = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
            said.append(f"several {what}: {each}; rows of one are never compared with rows of another")
    apart = sum(len({cell.result.environment.get("gpu_uuid") for cell in group if cell.value}) > 1 for group in groups)
    if apart:
        said.append(f"rivals of {apart} cases ran on different GPUs of one model, which may differ by 2 %")
    return said
