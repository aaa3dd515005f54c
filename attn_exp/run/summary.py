"""What a sweep says as a whole, for the page of its own run: the answer, counts, means, and where each job stands."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.compare.brief import answer_in_brief, code, safe, tables_in_brief
from attn_exp.compare.standing import standings
from attn_exp.core.errors import first_line
from attn_exp.core.flags import doubts
from attn_exp.core.record import Record
from attn_exp.results.read import counted_of
from attn_exp.results.result import Result
from attn_exp.tracking.base import LIST_PLACE, Summary, duel_metrics, params

if TYPE_CHECKING:
    from attn_exp.compare.rivals import Rivals

_REASONS = 5


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
            dict.fromkeys(result.label for result in sorted(results, key=lambda one: one.started_at))
        ),
        "gpu": ", ".join(sorted({result.device_name for result in results} - {""})),
    }
    moment = max((result.finished_at for result in results), default=None)
    shared = _shared(params(result) for result in results)
    counted = _counted(results, counts, planned)
    without_answer = Summary(description=counted, params=shared, tags=tags, metrics=metrics, moment=moment)
    if rivals is None:
        return without_answer
    try:
        found = standings(rivals)
        answer, tables = answer_in_brief(rivals), tables_in_brief(rivals, found)
    except Exception as error:
        # What fails here may not cost the records.
        say(f"no description in MLflow: {first_line(error)}")
        return without_answer
    for one in found.backends:
        if one.speedup is not None:
            metrics[f"{one.direction}/speedup/{one.label}"] = one.speedup
            metrics[f"{one.direction}/speedup/{one.label} cases"] = float(one.n)
        metrics[f"{one.direction}/best_in/{one.label}"] = float(one.best)
    return Summary(
        answer=answer,
        description="\n\n".join([tables, counted]),
        params=shared,
        tags=tags | {"baseline": found.baseline, "answer": "; ".join(rivals.answer.lines())},
        metrics=metrics,
        of_jobs=found.of_jobs,
        standing=found.said,
        undecided=found.undecided,
        results=results,
        moment=moment,
    )


def duel_summary(
    records: Sequence[Record], verdicts: Mapping[str, Sequence[Mapping[str, Any]]], report: str
) -> Summary:
    """Return the summary of a duel: the printed report, and its metrics."""
    return Summary(answer=code(report) if report else "", metrics=duel_metrics(records, verdicts))


def _shared(each: Iterable[Mapping[str, str]]) -> dict[str, str]:
    items = [set(one.items()) for one in each]
    return dict(sorted(set.intersection(*items))) if items else {}


def _counted(results: Sequence[Result], counts: Counter[str], planned: int | None) -> str:
    """Return how many jobs ended how and with which flags, and the first reasons why some have no result."""
    each = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    lines = [": ".join(filter(None, [counted_of(len(results), planned, "job"), each]))]
    if flags := Counter(flag for one in results for flag in one.flags):
        doubtful = sum(bool(doubts(one.flags)) for one in results)
        said = ", ".join(f"{flag} {count}" for flag, count in flags.most_common())
        lines[0] += (
            f"; with flags: {safe(said)}; {doubtful or 'none'} of them {'are' if doubtful > 1 else 'is'} in doubt"
        )
    reasons = dict.fromkeys(f"{one.label} {one.status}: {one.reason}" for one in results if one.reason)
    lines += [f"- {safe(reason)}" for reason in list(reasons)[:_REASONS]]
    if len(reasons) > _REASONS:
        lines.append(f"- ... and {len(reasons) - _REASONS} more reasons in table.csv")
    return "\n".join(lines)
