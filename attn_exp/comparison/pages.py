"""Pages: sheets, lines and notes of each kind of comparison, for all output formats, and a sweep's in brief."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from attn_exp.comparison.changes import Changes
from attn_exp.comparison.columns import shared_values
from attn_exp.comparison.comparison import Comparison
from attn_exp.comparison.environment import environment_summary
from attn_exp.comparison.history import History, Trend
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.record.flags import FLAGS, flag_notes
from attn_exp.core.sheet.render import markdown_text, sheet_markdown
from attn_exp.core.sheet.sheet import MARK, Column, Headline, Page, Sheet, Tone, of_all, split, written
from attn_exp.core.text import printable
from attn_exp.results.cell import Cell
from attn_exp.results.duel_command import Duel
from attn_exp.results.read import Sweep, counted_of
from attn_exp.results.result import Result
from attn_exp.results.table import opinion_notes

_FEWER = "means over fewer cases may leave out the slow ones"


def rivals_page(rivals: Rivals) -> Page:
    """Return the page of a sweep's backends, ranked case by case."""
    shared = shared_values(rivals.rows)
    sheets = [rivals.sheet(), *_means_sheet(rivals), *_ties_sheet(rivals.ties)]
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
        *_row_notes([row.cell for row in rivals.rows]),
    ]
    headline = _headline(rivals)
    count, runs = sum(len(sweep.results) for sweep in rivals.sweeps), len(rivals.sweeps)
    pooled = f"{count} records of {runs} sweeps are pooled; against=SWEEP compares one with another"
    lines = (*head_lines(rivals), pooled if runs > 1 else "", shared_line(shared))
    return Page(about, lines, tuple(sheets), tuple(notes), headline=headline)


def end_page(rivals: Rivals) -> Page:
    """Return what a sweep prints at its end: the answer, what all jobs share, and why some have no number."""
    cells = [row.cell for row in rivals.rows]
    devices = sorted({cell.result.device_name for cell in cells} - {""})
    lines = (", ".join(filter(None, [*devices, shared_line(shared_values(rivals.rows))])),)
    notes = (*flag_notes(flag for cell in cells for flag in cell.flags), *reasons(cells))
    return Page({}, lines, (), notes, headline=_headline(rivals))


def _row_notes(cells: Sequence[Cell]) -> list[str]:
    """Return what flags mean, which timers disagree, and why cells have no value."""
    results = [cell.result for cell in cells]
    return [*flag_notes(flag for result in results for flag in result.flags), *opinion_notes(results), *reasons(cells)]


def _headline(rivals: Rivals) -> Headline:
    return Headline(tuple(rivals.answer.headline()), (), *rivals.answer.next_step(), rivals.table)


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
    shared = shared_values(changes.rows)
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
        *_row_notes([row.cell for row in changes.rows]),
    ]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in changes.counts.items())
    said = f"of {len(changes.rows)} cells: {counts}"
    lines = [*head_lines(changes), shared_line(shared)]
    return Page(about, tuple(lines), (changes.sheet(),), tuple(notes), headline=Headline((said,)))


def history_page(history: History) -> Page:
    """Return the page of trends, those that changed level first, with what changed in the environment."""
    shared = shared_values(history.rows)
    names = [sweep.name for sweep in history.sweeps]
    notes = [_turn_note(row, names) for row in history.rows if row.turns] + list(history.notes)
    about = about_part(history) | {"kind": "history", "shared": shared}
    lines = head_lines(history)
    if len(lines) > 4:
        span = f"{day(history.sweeps[0].when)} to {day(history.sweeps[-1].when)}"
        devices = ", ".join(sorted({device for sweep in history.sweeps for device in sweep.devices}))
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
    else:
        assert isinstance(comparison, History)
        own = history_page(comparison)
    return detailed(own, comparison)


def detailed(page: Page, comparison: Comparison) -> Page:
    """Return the page with its details and the notes that they make redundant."""
    cells, results = [row.cell for row in comparison.rows], comparison.results
    flags = [flag for result in results for flag in result.flags]
    sheets = (_flags(Counter(flags)), _statuses(results), _environments(comparison))
    redundant = [*flag_notes(flags), *reasons(cells), *differing_notes(comparison)]
    warnings = (
        *page.headline.warnings,
        *_missing(comparison),
        *_failed(results),
        *differing_notes(comparison),
        *comparison.broken,
    )
    return replace(
        page,
        details=tuple(sheet for sheet in sheets if sheet.rows),
        detailed=frozenset(redundant),
        headline=replace(page.headline, warnings=warnings),
        made_by=tuple(dict.fromkeys(sweep.command for sweep in comparison.sweeps if sweep.command)),
    )


def _missing(comparison: Comparison) -> list[str]:
    """Return a sentence for each sweep that lacks jobs that its command is for."""
    return [
        f"{run.name}: {run.planned - len(run.results)} of {run.planned} jobs have no record yet; its command measures "
        "them"
        for run in comparison.sweeps
        if run.planned is not None and run.planned > len(run.results)
    ]


def _failed(results: Sequence[Result]) -> list[str]:
    """Return a sentence that says how many jobs have no result."""
    counts = Counter(result.status for result in results if result.status != "ok")
    if not counts:
        return []
    each = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return [f"{counts.total()} of {len(results)} jobs have no result ({each})"]


def _flags(counts: Counter[str]) -> Sheet:
    columns = (Column("flag", "flag"), Column("jobs", "jobs"), Column("says", "meaning"))
    rows = [(name, counts[name], FLAGS.get(name, ("", ""))[1]) for name in sorted(counts)]
    return Sheet("flags", "flags", columns, tuple(rows))


_BAD: tuple[Tone, ...] = ("bad",)


def _statuses(results: Sequence[Result]) -> Sheet:
    counts = Counter((job.status, job.label, job.reason or "") for job in results if job.status != "ok")
    columns = tuple(Column(name, name) for name in ("status", "backend", "jobs", "reason"))
    rows = [(status, label, counts[status, label, reason], reason) for status, label, reason in sorted(counts)]
    return Sheet("statuses", "jobs without a result", columns, tuple(rows), _BAD * len(rows))


def _environments(comparison: Comparison) -> Sheet:
    """A row per property and a column per sweep; differences first."""
    by_sweep = [environment_summary(sweep.results) for sweep in comparison.sweeps]
    names = {name for values in by_sweep for name in values}
    rows = [(name, *(values.get(name, "") for values in by_sweep)) for name in names]
    rows.sort(key=lambda row: (len(set(row[1:])) == 1, row[0]))
    columns = (
        Column("name", "environment"),
        *(Column(f"sweep{index}", sweep.name) for index, sweep in enumerate(comparison.sweeps)),
    )
    tones: list[Tone] = ["open" if len(set(row[1:])) > 1 else "" for row in rows]
    return Sheet("environment", "environment", columns, tuple(rows), tuple(tones))


def _ties_sheet(ties: Sequence[Duel]) -> list[Sheet]:
    """Return the sheet of duel commands; tables print them as lines."""
    columns = tuple(Column(column, column) for column in ("case", "pass", "a", "b", "command"))
    rows = tuple(
        (duel.a.result.case.label(), duel.a.direction, duel.a.result.label, duel.b.result.label, duel.command)
        for duel in ties
    )
    return [Sheet("ties", "too close to call; a duel would decide:", columns, rows)] if rows else []


def about_part(comparison: Comparison) -> dict[str, Any]:
    """Return what the JSON output of every page says about its sweeps."""
    return {
        "metric": str(comparison.metric),
        "sweeps": [
            {
                "name": sweep.name,
                "place": sweep.place,
                "records": len(sweep.results),
                "planned": sweep.planned,
                "devices": sweep.devices,
                "torch": _torches(sweep),
                "ended_at": day(sweep.when),
            }
            for sweep in comparison.sweeps
        ],
        "differences": [asdict(difference) for difference in comparison.differences],
        "broken": list(comparison.broken),
    }


def _torches(sweep: Sweep) -> list[str]:
    return sorted({str(result.environment.get("versions", {}).get("torch", "")) for result in sweep.results} - {""})


def head_lines(comparison: Comparison) -> list[str]:
    """Return a line per sweep: its name, number of records, device and date."""
    return [
        ", ".join(
            [
                f"{sweep.name}: {counted_of(len(sweep.results), sweep.planned, 'record')}",
                *sweep.devices,
                *(f"torch {version}" for version in _torches(sweep)),
                day(sweep.when),
            ]
        )
        for sweep in comparison.sweeps
    ]


# Values that go without saying; the device is named beside them.
_DEFAULTS = {"align": ("bottom_right",), "layout": ("bhsd",), "timer": ("device", "cpu"), "device": ("cuda", "cpu")}


def shared_line(shared: dict[str, Any]) -> str:
    """Return what all rows share, in one line, under the names that one types, without defaults."""
    names = {name: name for name, value in shared.items() if value not in _DEFAULTS.get(name, ())}
    for name, same in (("kv_len", "q_len"), ("kv_heads", "q_heads"), ("value_dim", "head_dim")):
        if name in names and shared[name] == shared.get(same):
            del names[name]
            names |= {"q_len": "seq_len"} if same == "q_len" else {}
    return ", ".join(
        f"{typed} {written(shared[name], 'dtype' if name == 'dtype' else 'text')}" for name, typed in names.items()
    )


def differing_notes(comparison: Comparison) -> list[str]:
    """Return a sentence for each difference between the environments."""
    return [f"environment: {difference} (in {difference.cells} cells)" for difference in comparison.differences]


def day(seconds: float) -> str:
    """Format a time as date and minute in UTC; empty if unknown."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else ""


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence for each reason why cells have no value."""
    sentences = dict.fromkeys(
        f"{cell.result.label} {cell.result.status}: {cell.result.reason}" for cell in cells if cell.result.reason
    )
    return list(sentences)


# A description has room for a table of so many rows.
_ROWS = 40


def answer_in_brief(rivals: Rivals) -> str:
    """Return the answer of a sweep as Markdown: headline, table, and the command that decides what is too close."""
    answer = rivals.answer
    said, command = answer.next_step()
    parts = ["  \n".join(f"**{safe(line)}**" for line in answer.headline())]
    if answer.won:
        parts += [sheet_markdown(rivals.table, _ROWS), safe(rivals.table.title.replace(f"{MARK} ", "bold: "))]
        parts.append(safe(rivals.table.note))
    # In one paragraph: MLflow shows 100 pixels of a description, and folds the rest.
    line = printable(command)
    parts.append(" ".join(filter(None, [safe(said), f"`` {line} ``" if "`" in line else line and f"`{line}`"])))
    return "\n\n".join(filter(None, parts))


def shared_in_brief(rivals: Rivals) -> str:
    """Return what all rows share, as Markdown; the report has the tables."""
    shared = safe(shared_line(shared_values(rivals.rows)))
    return f"All cases: {shared}." if shared else ""


def safe(text: str) -> str:
    """Return text on one line that Markdown shows literally."""
    return markdown_text(printable(text))
