"""Pages: sheets, lines and notes of each kind of comparison, for all output formats."""

from collections.abc import Sequence

from attn_exp.comparison.changes import Changes
from attn_exp.comparison.comparison import Comparison
from attn_exp.comparison.history import History, Trend
from attn_exp.comparison.page_parts import (
    about_part,
    day,
    detailed,
    differing_notes,
    duels_sheet,
    head_lines,
    reasons,
    shared_line,
    shared_values,
)
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.record.flags import flag_notes
from attn_exp.core.sheet.sheet import Column, Headline, Page, Sheet, of_all, split, written
from attn_exp.results.table import opinion_notes

_FEWER = "means over fewer cases may leave out the slow ones"


def rivals_page(rivals: Rivals) -> Page:
    """Return the page of a sweep's backends, ranked case by case."""
    shared = shared_values([row.cell for row in rivals.rows])
    sheets = [
        rivals.sheet(),
        *_means_sheet(rivals),
        *duels_sheet(rivals.ties, "ties", "too close to call; a duel would decide:"),
    ]
    about = about_part(rivals) | {
        "kind": "rivals",
        "baseline": rivals.baseline,
        "by": list(rivals.by),
        "shared": shared,
        "answer": [
            {
                "case": one.group[0].cell.result.case.label(),
                "pass": one.direction,
                "fastest": [row.label for row in one.rows],
                "too_close_to_call": one.tied,
            }
            for one in rivals.answer.won
        ],
        "answer_text": rivals.answer.lines(),
    }
    notes = [
        *rivals.notes,
        *([_FEWER] if any(mean.n < mean.cases for mean in rivals.means) else ()),
        *differing_notes(rivals),
        *flag_notes(flag for row in rivals.rows for flag in row.cell.result.flags),
        *opinion_notes(row.cell.result for row in rivals.rows),
        *reasons([row.cell for row in rivals.rows]),
    ]
    headline = _headline(rivals)
    lines = (*head_lines(rivals), *_pooled(rivals), shared_line(shared))
    return Page(about, lines, tuple(sheets), tuple(notes), headline=headline)


def end_page(rivals: Rivals) -> Page:
    """Return what a sweep prints at its end: the answer, what all jobs share, and why some have no number."""
    cells = [row.cell for row in rivals.rows]
    devices = sorted({cell.result.device_name for cell in cells} - {""})
    lines = (", ".join(filter(None, [*devices, shared_line(shared_values(cells))])),)
    notes = (*flag_notes(flag for cell in cells for flag in cell.flags), *reasons(cells))
    return Page({}, lines, (), notes, headline=_headline(rivals))


def _headline(rivals: Rivals) -> Headline:
    return Headline(tuple(rivals.answer.headline()), (), *rivals.answer.next_step(), rivals.table)


def _pooled(rivals: Rivals) -> list[str]:
    """Return that records of several sweeps are ranked together."""
    if len(rivals.sweeps) < 2:
        return []
    count = sum(one.records for one in rivals.sweeps)
    return [f"{count} records of {len(rivals.sweeps)} sweeps are pooled; against=SWEEP compares one with another"]


def _means_sheet(rivals: Rivals) -> list[Sheet]:
    if len({mean.label for mean in rivals.means}) < 2:
        return []
    over = f"over {rivals.baseline}" if rivals.baseline else "of the best"
    columns, values = split(
        (
            (Column("pass", "pass"), lambda mean: mean.direction),
            (Column("backend", "backend"), lambda mean: mean.label),
            # Before the mean: over fewer cases it does not compare with others.
            (Column("of_all", "cases", joined=lambda row: of_all(row["n"], row["cases"])), None),
            (Column("mean_gain", over, "ratio"), lambda mean: mean.value),
            (Column("least", "least", "ratio"), lambda mean: mean.least),
            (Column("most", "most", "ratio"), lambda mean: mean.most),
            (Column("n", ""), lambda mean: mean.n),
            (Column("cases", ""), lambda mean: mean.cases),
            (Column("best", "best in"), lambda mean: mean.best),
        )
    )
    columns = (*(Column(name, name, "dtype" if name == "dtype" else "text") for name in rivals.by), *columns)
    rows = [(*mean.group, *values(mean)) for mean in rivals.means]
    return [Sheet("means", "geometric means", columns, tuple(rows))]


def changes_page(changes: Changes) -> Page:
    """Return the page of changes: verdicts, the most urgent first, differences between environments, and duels."""
    shared = shared_values([row.cell for row in changes.rows])
    about = about_part(changes) | {
        "kind": "changes",
        "old_sweeps": changes.old,
        "counts": changes.counts,
        "margin": changes.margin,
        "shared": shared,
    }
    notes = [
        *changes.notes,
        f"equivalent: a difference of {100 * changes.margin:g} % or more is ruled out (margin=)",
        *(differing_notes(changes) or ["environment: no difference is recorded"]),
        *flag_notes(flag for row in changes.rows for flag in row.cell.result.flags),
        *opinion_notes(row.cell.result for row in changes.rows),
        *reasons([row.cell for row in changes.rows]),
    ]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in changes.counts.items())
    said = f"of {len(changes.rows)} cells: {counts}"
    lines = [*head_lines(changes), shared_line(shared)]
    return Page(about, tuple(lines), (changes.sheet(),), tuple(notes), headline=Headline((said,)))


def history_page(history: History) -> Page:
    """Return the page of trends, those that changed level first, with what changed in the environment."""
    shared = shared_values([row.cell for row in history.rows])
    names = [one.name for one in history.sweeps]
    notes = [_turn_note(row, names) for row in history.rows if row.turns] + list(history.notes)
    about = about_part(history) | {"kind": "history", "shared": shared}
    lines = head_lines(history)
    if len(lines) > 4:
        span = f"{day(history.sweeps[0].ended_at)} to {day(history.sweeps[-1].ended_at)}"
        devices = ", ".join(sorted({device for one in history.sweeps for device in one.devices}))
        lines = [f"{len(names)} sweeps, {names[0]} to {names[-1]}, {span}, {devices}"]
    turned = sum(bool(row.turns) for row in history.rows)
    said = f"of {len(history.rows)} cells: {turned} changed level"
    lines.append(shared_line(shared))
    return Page(about, tuple(lines), (history.sheet(),), tuple(notes), headline=Headline((said,)))


def _turn_note(row: Trend, names: Sequence[str]) -> str:
    parts = []
    for turn in row.turns:
        around = "; ".join(map(str, turn.coincides)) or "no difference between the environments is recorded"
        parts.append(f"{written(turn.change, 'percent')} % at {names[turn.at]}: {around}")
    return f"{row.cell.result.label} {row.cell.result.case.label()} {row.cell.direction} {', '.join(parts)}"


def page(comparison: Comparison) -> Page:
    """Return the page of a comparison of any kind."""
    if isinstance(comparison, Rivals):
        own = rivals_page(comparison)
    elif isinstance(comparison, Changes):
        own = changes_page(comparison)
    elif isinstance(comparison, History):
        own = history_page(comparison)
    else:
        raise TypeError(f"there is no page for {type(comparison).__name__}")
    return detailed(own, comparison, [row.cell for row in comparison.rows])
