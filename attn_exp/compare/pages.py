"""Pages: sheets, lines and notes of each kind of comparison, for all output formats."""

from collections.abc import Sequence

from attn_exp.compare.again import opposing
from attn_exp.compare.changes import Changes
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.history import History, Trend
from attn_exp.compare.page_parts import (
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
from attn_exp.compare.published import Published
from attn_exp.compare.rivals import Rivals
from attn_exp.compare.sheet import Column, Headline, Page, Sheet, interval, of_all, written
from attn_exp.compare.takeaway import Answer
from attn_exp.core.flags import flag_notes
from attn_exp.results.opinions import opinion_notes

_FEWER = "a mean over fewer cases, as 3 of 12, does not compare with others: those left out may be the slow ones"


def rivals_page(rivals: Rivals) -> Page:
    """Return the page of a sweep's backends, ranked case by case."""
    shared = shared_values([row.cell for row in rivals.rows])
    sheets = [
        rivals.sheet(),
        *_means_sheet(rivals),
        *_answer_sheet(rivals.answer),
        *_settled_sheet(rivals),
        *duels_sheet(rivals.ties, "ties", "undecided; a duel would decide:"),
    ]
    about = about_part(rivals) | {
        "kind": "rivals",
        "baseline": rivals.baseline,
        "by": list(rivals.by),
        "shared": shared,
        "answer_text": rivals.answer.lines(most=None),
    }
    notes = [
        *rivals.notes,
        *([_FEWER] if any(mean.n < mean.cases for mean in rivals.means) else ()),
        *differing_notes(rivals),
        *flag_notes(flag for row in rivals.rows for flag in row.cell.result.flags),
        *opinion_notes(row.cell.result for row in rivals.rows),
        *reasons([row.cell for row in rivals.rows]),
    ]
    found = rivals.answer
    cautions = (" ".join(one.lines()) for one in found.cautions)
    headline = Headline(tuple(found.said()), tuple(filter(None, [found.warning, *cautions])), *found.next_step())
    lines = (*found.lines(), *head_lines(rivals), *_pooled(rivals), shared_line(shared))
    return Page(about, lines, tuple(sheets), tuple(notes), headline=headline)


def _pooled(rivals: Rivals) -> list[str]:
    """Return that records of several sweeps are ranked together, and what to type to compare one with another."""
    if len(rivals.sweeps) < 2:
        return []
    count = sum(one.records for one in rivals.sweeps)
    command = opposing(rivals.sweeps)
    said = f"{count} records of {len(rivals.sweeps)} sweeps are pooled; against=SWEEP compares one with another"
    return [f"{said}:", command] if command else [said]


def _means_sheet(rivals: Rivals) -> list[Sheet]:
    if len({mean.label for mean in rivals.means}) < 2:
        return []
    columns = (
        *(Column(name, name, "dtype" if name == "dtype" else "text") for name in rivals.by),
        Column("pass", "pass"),
        Column("backend", "backend"),
        # Before the mean: over fewer cases it does not compare with others.
        Column("of_all", "cases", joined=lambda values: of_all(values["n"], values["cases"])),
        Column("mean_gain", f"over {rivals.baseline}" if rivals.baseline else "of the best", "ratio"),
        Column("least", "least", "ratio"),
        Column("most", "most", "ratio"),
        Column("n", ""),
        Column("cases", ""),
        Column("best", "surely best in"),
        Column("left_out", "left out"),
    )
    rows = [
        (
            *mean.group,
            mean.direction,
            mean.label,
            None,
            mean.value,
            mean.least,
            mean.most,
            mean.n,
            mean.cases,
            mean.best,
            ", ".join(f"{count} {why}" for why, count in mean.left_out),
        )
        for mean in rivals.means
    ]
    return [Sheet("means", "geometric means", columns, tuple(rows))]


def _answer_sheet(answer: Answer) -> list[Sheet]:
    if not answer.rules:
        return []
    columns = (
        Column("where", "where"),
        Column("pick", "pick"),
        Column("same_kernel", "same kernel"),
        Column("ties", "too close to call"),
        Column("times", "over the next", "ratio"),
        Column("low", ""),
        Column("high", ""),
        Column("interval", "95 %", joined=interval("low", "high", instead=None)),
        Column("over", "the next"),
        Column("sure", "sure in", joined=lambda values: f"{values['wins']} of {values['n']}"),
        Column("wins", ""),
        Column("close", "too close in", spare=2),
        Column("open", "open in", spare=2),
        Column("n", ""),
        Column("cases", ""),
        Column("perhaps", "may be better", spare=1),
    )
    rows = [
        (rule.where or "all", rule.label or "undecided", " ".join(rule.same), " ".join(rule.ties))
        + (rule.ratio, rule.low, rule.high, None, rule.over or "")
        + (None, rule.wins, rule.close, rule.open, rule.n, rule.cases, " ".join(rule.perhaps))
        for rule in answer.rules
    ]
    return [Sheet("answer", "pick this", columns, tuple(rows))]


def _settled_sheet(rivals: Rivals) -> list[Sheet]:
    if not rivals.settled:
        return []
    columns = (
        Column("case", "case"),
        Column("pass", "pass"),
        Column("a", ""),
        Column("times", ""),
        Column("low", ""),
        Column("high", ""),
        Column("b", ""),
        Column("verdict", ""),
        Column("said", "verdict"),
        Column("duel", "duel", spare=1),
    )
    rows = [
        (one.row.cell.result.case.label(), one.row.cell.direction, one.row.cell.result.label)
        + (one.found.value, one.found.low, one.found.high, one.other.cell.result.label)
        + ("equivalent" if one.found.equal else "faster", one.said, one.found.duel)
        for one in rivals.settled
    ]
    return [Sheet("settled", "decided by duels", columns, tuple(rows))]


def changes_page(changes: Changes) -> Page:
    """Return the page of changes: verdicts, the most urgent first, differences between environments, and duels."""
    shared = shared_values([row.cell for row in changes.rows])
    sheets = [
        changes.sheet(),
        *duels_sheet(changes.duels, "duels", "undecided; to decide, run the same duel in both environments:"),
    ]
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
    lines = [*head_lines(changes), shared_line(shared), said]
    return Page(about, tuple(lines), tuple(sheets), tuple(notes), headline=Headline((said,)))


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
    lines += [shared_line(shared), said]
    return Page(about, tuple(lines), (history.sheet(),), tuple(notes), headline=Headline((said,)))


def _turn_note(row: Trend, names: Sequence[str]) -> str:
    parts = []
    for turn in row.turns:
        around = "; ".join(map(str, turn.coincides)) or "no difference between the environments is recorded"
        parts.append(f"{written(turn.change, 'percent')} % at {names[turn.at]}: {around}")
    return f"{row.cell.result.label} {row.cell.result.case.label()} {row.cell.direction} {', '.join(parts)}"


def published_page(published: Published) -> Page:
    """Return the page of our cells and the published figures of the same shape."""
    shared = shared_values([row.cell for row in published.rows])
    matched = len({id(row.figure) for row in published.rows})
    about = about_part(published) | {"kind": "published", "figures": published.figures, "shared": shared}
    said = f"{matched} of {published.figures} figures have a shape that was measured here"
    lines = (*head_lines(published), shared_line(shared), said)
    return Page(about, lines, (published.sheet(),), published.notes, headline=Headline((said,)))


def page(comparison: Comparison) -> Page:
    """Return the page of a comparison of any kind."""
    if isinstance(comparison, Rivals):
        own = rivals_page(comparison)
    elif isinstance(comparison, Changes):
        own = changes_page(comparison)
    elif isinstance(comparison, History):
        own = history_page(comparison)
    elif isinstance(comparison, Published):
        own = published_page(comparison)
    else:
        raise TypeError(f"there is no page for {type(comparison).__name__}")
    return detailed(own, comparison, [row.cell for row in comparison.rows])
