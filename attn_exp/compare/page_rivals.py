"""The page of rivals: rows, geometric means, what to pick, and the duels that would decide."""

from collections.abc import Sequence

from attn_exp.compare.page_parts import (
    about_part,
    case_part,
    case_values,
    cell_values,
    differing_notes,
    duels_sheet,
    head_lines,
    reasons,
    shared_line,
    value_columns,
)
from attn_exp.compare.picks import Pick
from attn_exp.compare.rivals import Rivals
from attn_exp.compare.sheet import Column, Page, Sheet, Tone, interval
from attn_exp.flags import flag_marks, flag_notes


def rivals_page(found: Rivals) -> Page:
    """The page of a sweep's backends beside each other."""
    shared, case = case_part([row.cell for row in found.rows])
    over = f"over {found.baseline}" if found.baseline else "of the best"
    columns = (
        *case,
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column("status", ""),
        *value_columns(found.metric),
        Column("gain", over, "ratio"),
        Column("gain_low", ""),
        Column("gain_high", ""),
        Column("interval", "95 %", joined=interval("gain_low", "gain_high"), spare=2),
        Column("best", "best"),
        Column("flags", ""),
        Column("marks", "marks", spare=1),
        Column("reason", ""),
        Column("job", ""),
        Column("sweep", "sweep" if len(found.sweeps) > 1 else ""),
    )
    rows = [
        (
            *case_values(row.cell),
            row.cell.direction,
            row.cell.result.label,
            row.cell.result.status,
            *cell_values(row.cell, found.metric),
            *((row.gain.value, row.gain.low, row.gain.high) if row.gain else (None, None, None)),
            None,
            "*" if row.best else "",
            " ".join(row.cell.result.flags),
            flag_marks(row.cell.result.flags),
            row.cell.result.reason or "",
            row.cell.result.job,
            row.cell.result.sweep,
        )
        for row in found.rows
    ]
    tones: list[Tone] = ["bad" if row.cell.value is None else "best" if row.best else "" for row in found.rows]
    sheets = [
        Sheet("rows", "", columns, tuple(rows), tuple(tones)),
        *_means_sheet(found),
        *_picks_sheet(found.picks),
        *duels_sheet(found.ties, "ties", "not told apart; side by side they would be"),
    ]
    about = about_part(found) | {"kind": "rivals", "baseline": found.baseline, "by": list(found.by), "shared": shared}
    notes = [
        *found.notes,
        *differing_notes(found),
        *flag_notes(flag for row in found.rows for flag in row.cell.result.flags),
        *reasons([row.cell for row in found.rows]),
    ]
    return Page(about, (*head_lines(found), shared_line(shared)), tuple(sheets), tuple(notes))


def _means_sheet(found: Rivals) -> list[Sheet]:
    if len({mean.label for mean in found.means}) < 2:
        return []
    columns = (
        *(Column(name, name) for name in found.by),
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column("mean_gain", f"over {found.baseline}" if found.baseline else "of the best", "ratio"),
        Column("least", "least", "ratio"),
        Column("most", "most", "ratio"),
        Column("n", "n"),
        Column("best", "best in"),
        Column("left_out", "left out"),
    )
    rows = [
        (
            *mean.group,
            mean.direction,
            mean.label,
            mean.value,
            mean.least,
            mean.most,
            mean.n,
            mean.best,
            ", ".join(f"{count} {why}" for why, count in mean.left_out),
        )
        for mean in found.means
    ]
    return [Sheet("means", "geometric means over n cases", columns, tuple(rows))]


def _picks_sheet(picks: Sequence[Pick]) -> list[Sheet]:
    if not picks or all(not pick.ties and pick.ahead is None for pick in picks):
        return []
    names = [name for name, _ in picks[0].shape]
    axis = picks[0].axis
    columns = (
        Column("pass", "pass"),
        *(Column(name, name) for name in names),
        *((Column(f"{axis}_from", f"{axis} from"), Column(f"{axis}_to", "to")) if axis else ()),
        Column("pick", "pick"),
        Column("ties", "not told from it"),
        Column("ahead", "ahead of the rest", "ratio"),
        Column("n", "cases"),
    )
    rows = [
        (
            pick.direction,
            *(value for _, value in pick.shape),
            *((pick.low, pick.high) if axis else ()),
            pick.label,
            " ".join(pick.ties),
            pick.ahead,
            pick.n,
        )
        for pick in picks
    ]
    return [Sheet("picks", "pick this", columns, tuple(rows))]
