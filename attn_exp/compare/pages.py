"""Pages: sheets, lines and notes of each kind of comparison, for all output formats."""

from collections.abc import Sequence

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
from attn_exp.compare.rivals import Pick, Rivals
from attn_exp.compare.sheet import Column, Page, Sheet, written
from attn_exp.core.flags import flag_notes


def rivals_page(found: Rivals) -> Page:
    """Return the page of a sweep's backends, ranked case by case."""
    shared = shared_values([row.cell for row in found.rows])
    sheets = [
        found.sheet(),
        *_means_sheet(found),
        *_picks_sheet(found.picks),
        *duels_sheet(found.ties, "ties", "too close to call; a duel would decide:"),
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
        Column("ties", "too close to call"),
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


def changes_page(found: Changes) -> Page:
    """Return the page of changes: verdicts, the most urgent first, differences between environments, and duels."""
    shared = shared_values([row.cell for row in found.rows])
    sheets = [
        found.sheet(),
        *duels_sheet(found.duels, "duels", "undecided; to decide, run the same duel in both environments:"),
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
        f"equivalent: a difference of {100 * found.margin:g} % or more is ruled out (margin=)",
        *(differing_notes(found) or ["environment: no difference is recorded"]),
        *flag_notes(flag for row in found.rows for flag in row.cell.result.flags),
        *reasons([row.cell for row in found.rows]),
    ]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items())
    lines = [*head_lines(found), shared_line(shared), f"of {len(found.rows)} cells: {counts}"]
    return Page(about, tuple(lines), tuple(sheets), tuple(notes))


def history_page(found: History) -> Page:
    """Return the page of trends, those that changed level first, with what changed in the environment."""
    shared = shared_values([row.cell for row in found.rows])
    names = [one.name for one in found.sweeps]
    notes = [_turn_note(row, names) for row in found.rows if row.turns] + list(found.notes)
    about = about_part(found) | {"kind": "history", "shared": shared}
    lines = head_lines(found)
    if len(lines) > 4:
        span = f"{day(found.sweeps[0].ended_at)} to {day(found.sweeps[-1].ended_at)}"
        devices = ", ".join(sorted({device for one in found.sweeps for device in one.devices}))
        lines = [f"{len(names)} sweeps, {names[0]} to {names[-1]}, {span}, {devices}"]
    turned = sum(bool(row.turns) for row in found.rows)
    lines += [shared_line(shared), f"of {len(found.rows)} cells: {turned} changed level"]
    return Page(about, tuple(lines), (found.sheet(),), tuple(notes))


def _turn_note(row: Trend, names: Sequence[str]) -> str:
    said = []
    for turn in row.turns:
        around = "; ".join(map(str, turn.coincides)) or "no difference between the environments is recorded"
        said.append(f"{written(turn.change, 'percent')} % at {names[turn.at]}: {around}")
    return f"{row.cell.result.label} {row.cell.result.case.label()} {row.cell.direction} {', '.join(said)}"


def published_page(found: Published) -> Page:
    """Return the page of our cells and the published figures of the same shape."""
    shared = shared_values([row.cell for row in found.rows])
    about = about_part(found) | {"kind": "published", "figures": found.figures, "shared": shared}
    lines = (
        *head_lines(found),
        shared_line(shared),
        f"{len({id(row.figure) for row in found.rows})} of {found.figures} figures have a shape that was measured here",
    )
    return Page(about, lines, (found.sheet(),), found.notes)


def page(found: Comparison) -> Page:
    """Return the page of a comparison of any kind."""
    if isinstance(found, Rivals):
        own = rivals_page(found)
    elif isinstance(found, Changes):
        own = changes_page(found)
    elif isinstance(found, History):
        own = history_page(found)
    elif isinstance(found, Published):
        own = published_page(found)
    else:
        raise TypeError(f"there is no page for {type(found).__name__}")
    return detailed(own, found, [row.cell for row in found.rows])
