"""Summary of a sweep for MLflow: the answer, counts, means, where each job stands, and curves over length."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attn_exp.comparison.pages import answer_in_brief, safe, shared_in_brief
from attn_exp.comparison.standing import standings
from attn_exp.core.case.fields import typed_fields
from attn_exp.core.catalogue import colour_of
from attn_exp.core.errors import first_line
from attn_exp.core.record.flags import shown_flags
from attn_exp.plots.data import case_names, families, length, measured
from attn_exp.results.read import counted_of
from attn_exp.results.result import Result
from attn_exp.tracking.base import LIST_PLACE, Curve, Summary, params

if TYPE_CHECKING:
    from attn_exp.comparison.rivals import Rivals

_REASONS = 5
# MLflow's pages become slow with more than about a hundred runs.
_MOST = 40
_CURVE_METRICS = ("tflops", "time_us")
_OF_LENGTH = ("q_len", "kv_len", "lengths", "kv_lengths")


def summary_of(
    results: Sequence[Result], rivals: "Rivals | None", say: Callable[[str], None], planned: int | None = None
) -> Summary:
    """Return the summary of a sweep; without `rivals`, or where they cannot be summed up, only its counts.

    `planned` is how many jobs its command is for, None if unknown.
    """
    counts = Counter[str](result.status for result in results)
    # The sweep's own run is the first of its list.
    metrics = {"jobs": float(len(results)), LIST_PLACE: 0.0}
    metrics |= {f"jobs/{status}": float(count) for status, count in counts.items()}
    tags = {
        "backends": ", ".join(
            dict.fromkeys(result.label for result in sorted(results, key=lambda result: result.started_at))
        ),
        "gpu": ", ".join(sorted({result.device_name for result in results} - {""})),
    }
    moment = max((result.finished_at for result in results), default=None)
    every = [set(params(result).items()) for result in results]
    shared = dict(sorted(set.intersection(*every))) if every else {}
    counted = _counted(results, counts, planned)
    without_answer = Summary(description=counted, params=shared, tags=tags, metrics=metrics, moment=moment)
    if rivals is None:
        return without_answer
    try:
        found = standings(rivals)
        answer, shared_cases = answer_in_brief(rivals), shared_in_brief(rivals)
    except Exception as error:
        # A failure here must not cost the records.
        say(f"no description in MLflow: {first_line(error)}")
        return without_answer
    for backend in found.backends:
        if backend.speedup is not None:
            metrics[f"{backend.direction}/speedup/{backend.label}"] = backend.speedup
            metrics[f"{backend.direction}/speedup/{backend.label} cases"] = float(backend.n)
        if backend.best:
            metrics[f"{backend.direction}/best_in/{backend.label}"] = float(backend.best)
    return Summary(
        answer=answer,
        description="\n\n".join(filter(None, [shared_cases, counted])),
        params=shared,
        tags=tags | {"baseline": found.baseline, "answer": "; ".join(rivals.answer.lines())},
        metrics=metrics,
        of_jobs=found.of_jobs,
        standing=found.said,
        results=results,
        moment=moment,
    )


def _counted(results: Sequence[Result], counts: Counter[str], planned: int | None) -> str:
    """Return how many jobs ended how and with which flags, and the first reasons why some have no result."""
    each = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    lines = [": ".join(filter(None, [counted_of(len(results), planned, "job"), each]))]
    if flags := Counter(flag for result in results for flag in shown_flags(result.flags)):
        lines[0] += f"; flags: {safe(', '.join(f'{flag} in {count}' for flag, count in flags.most_common()))}"
    reasons = dict.fromkeys(f"{result.label} {result.status}: {result.reason}" for result in results if result.reason)
    lines += [f"- {safe(reason)}" for reason in list(reasons)[:_REASONS]]
    if len(reasons) > _REASONS:
        lines.append(f"- ... and {len(reasons) - _REASONS} more reasons in table.csv")
    return "\n".join(lines)


def curves(results: Sequence[Result]) -> list[Curve]:
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
        for result in sorted(family, key=lambda result: result.finished_at):
            by_label[result.label].append(result)
        drawn += [_curve(label, name_of(own[0]), own, began) for label, own in by_label.items()]
    several = [curve for curve in drawn if any(len(points) > 1 for points in curve.points.values())]
    return sorted(several, key=lambda curve: -max(len(points) for points in curve.points.values()))[:_MOST]


def _curve(label: str, name: str, own: Sequence[Result], began: float) -> Curve:
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for result in own:
        for side in result.measuring.passes:
            for metric in _CURVE_METRICS:
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
