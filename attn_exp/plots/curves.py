"""Curves for trackers: a sweep's metrics over sequence length, one curve per backend and group of sizes."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_exp.core.case_fields import typed_fields
from attn_exp.core.catalogue import colour_of
from attn_exp.plots.data import case_names, families, length, measured
from attn_exp.tracking.base import Curve

if TYPE_CHECKING:
    from attn_exp.results.result import Result

# MLflow's pages become slow with more than about a hundred runs.
_MOST = 40
_METRICS = ("tflops", "time_us")
_OF_LENGTH = ("q_len", "kv_len", "lengths", "kv_lengths")


def curves(results: "Sequence[Result]") -> list[Curve]:
    """Return the curves of a sweep that has several lengths, those with the most lengths first."""
    together = families(measured(results, "time_us"))
    if not together:
        return []
    name_of = case_names([one[0] for one in together], leave_out=_OF_LENGTH)
    # Before the first job, so that a list sorted by time shows jobs first.
    began = min(result.started_at for result in results)
    drawn = []
    for family in together:
        by_label: dict[str, list[Result]] = defaultdict(list)
        for result in sorted(family, key=lambda one: one.finished_at):
            by_label[result.label].append(result)
        drawn += [_curve(label, name_of(own[0]), own, began) for label, own in by_label.items()]
    several = [curve for curve in drawn if any(len(points) > 1 for points in curve.points.values())]
    return sorted(several, key=lambda curve: -max(len(points) for points in curve.points.values()))[:_MOST]


def _curve(label: str, name: str, own: "Sequence[Result]", began: float) -> Curve:
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for result in own:
        for side in result.measuring.passes:
            for metric in _METRICS:
                value = result.metrics.get(f"{side}/{metric}")
                if value is not None:
                    # A name of its own, because the jobs' charts are not over length. A repeated measurement replaces
                    # the earlier one.
                    points[f"{side}/{metric}_by_length"][length(result.case)] = value
    first = own[0]
    typed = typed_fields(first.case, square=False)
    params = {key: str(value) for key, value in typed.items() if key not in _OF_LENGTH}
    return Curve(
        name=" · ".join(filter(None, [label, name])),
        label=label,
        colour=colour_of(str(first.backend.get("name", "?")), first.about),
        params={"backend": str(first.backend.get("name", "?")), "model": first.model, "compile": first.compile.mode}
        | params,
        points={metric: tuple(sorted(values.items())) for metric, values in points.items()},
        moment=began,
    )
