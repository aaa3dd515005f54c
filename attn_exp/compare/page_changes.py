"""The page of changes: a sweep against an earlier one."""

from attn_exp.compare.change import Change, Verdict
from attn_exp.compare.changes import Changes
from attn_exp.compare.page_parts import (
    about_part,
    case_part,
    case_values,
    differing_notes,
    duels_sheet,
    head_lines,
    reasons,
    shared_line,
)
from attn_exp.compare.sheet import Column, Page, Sheet, Tone, interval
from attn_exp.flags import flag_marks, flag_notes

_TONES: dict[Verdict, Tone] = {"lost": "bad", "slower": "bad", "faster": "good", "fixed": "good", "undecided": "open"}


def changes_page(found: Changes) -> Page:
    """Rows with verdicts, those that ask for attention first; what differs around them; duels for the undecided."""
    shared, case = case_part([row.cell for row in found.rows])
    name, head = found.metric.name, found.metric.head
    columns = (
        Column("verdict", "verdict"),
        *case,
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column(f"old_{name}", f"old {head}", "figure"),
        Column(f"new_{name}", f"new {head}", "figure"),
        Column("change", "change %", "percent"),
        Column("change_low", ""),
        Column("change_high", ""),
        Column("interval", "95 %", joined=interval("change_low", "change_high", form="percent"), spare=2),
        Column("p_adjusted", ""),
        Column("spread", ""),
        Column("session_factor", ""),
        Column("session_canaries", ""),
        Column("old_status", ""),
        Column("new_status", ""),
        Column("status", ""),
        Column("old_kernel", ""),
        Column("new_kernel", ""),
        Column("flags", ""),
        Column("marks", "marks", spare=1),
        Column("job", ""),
    )
    rows = tuple(_row(row) for row in found.rows)
    sheets = [
        Sheet("rows", "", columns, rows, tuple(_TONES.get(row.verdict, "") for row in found.rows)),
        *duels_sheet(found.duels, "duels", "undecided; the same duel in both environments is free of the session"),
    ]
    about = about_part(found) | {
        "kind": "changes",
        "old_sweeps": found.old,
        "counts": found.counts,
        "margin": found.margin,
        "shared": shared,
    }
    notes = [
        *found.notes,
        f"same: a difference of {100 * found.margin:g} % or more is ruled out (margin=)",
        *(differing_notes(found) or ["environment: no difference is recorded"]),
        *flag_notes(flag for row in found.rows for flag in row.cell.result.flags),
        *reasons([row.cell for row in found.rows]),
    ]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items())
    lines = [*head_lines(found), shared_line(shared), f"of {len(found.rows)} cells: {counts}"]
    return Page(about, tuple(lines), tuple(sheets), tuple(notes))


def _row(row: Change) -> tuple[object, ...]:
    statuses = [cell.result.status if cell else "" for cell in (row.old, row.new)]
    kernels = [cell.result.kernels.get(cell.direction, "") if cell else "" for cell in (row.old, row.new)]
    flags = row.cell.result.flags
    return (
        row.verdict,
        *case_values(row.cell),
        row.cell.direction,
        row.cell.result.label,
        row.old.value if row.old else None,
        row.new.value if row.new else None,
        row.change,
        row.low,
        row.high,
        None,
        row.p,
        row.spread,
        row.session.factor if row.session else None,
        " ".join(row.session.names) if row.session else "",
        *statuses,
        "ok" if statuses == ["ok", "ok"] else f"{statuses[0] or '-'} -> {statuses[1] or '-'}",
        *kernels,
        " ".join(flags),
        flag_marks(flags),
        row.cell.result.job,
    )
