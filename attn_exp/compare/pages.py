"""Pages: each kind of comparison as the sheets, lines and notes that every output shows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from attn_exp.compare.changes import Change, Changes, Verdict
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.history import History, Trend
from attn_exp.compare.page_parts import (
    about_part,
    case_part,
    case_values,
    cell_values,
    day,
    detailed,
    differing_notes,
    duels_sheet,
    head_lines,
    reasons,
    shared_line,
    value_columns,
)
from attn_exp.compare.published import Published
from attn_exp.compare.rivals import Pick, Rivals
from attn_exp.compare.sheet import Column, Page, Sheet, Tone, interval, written
from attn_exp.core.flags import flag_marks, flag_notes


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
    kernels = [cell.result.longest_kernel(cell.direction) if cell else "" for cell in (row.old, row.new)]
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


_LEVELS = "▁▂▃▄▅▆▇█"
# The curve's full height is this much, or the series' own range if that is more.
_FULL_HEIGHT = 0.05


def history_page(found: History) -> Page:
    """Trends, those whose level changed first; what changed in the environment beside each change of level."""
    shared, case = case_part([row.cell for row in found.rows])
    names = [one.name for one in found.sweeps]
    columns = (
        *case,
        Column("pass", "pass"),
        Column("backend", "backend"),
        Column("n", "n"),
        Column(f"first_{found.metric.name}", f"first {found.metric.head}", "figure"),
        Column(f"last_{found.metric.name}", f"last {found.metric.head}", "figure"),
        Column("change", "change %", "percent"),
        Column("per_sweep", "a sweep %", "percent", spare=2),
        Column("scatter", "+-%", "half", spare=1),
        Column("curve", "trend", joined=_curve([f"at_{name}" for name in names])),
        *(Column(f"at_{name}", "") for name in names),
        Column("level_changed", "level changed"),
        Column("coincides", ""),
        Column("last_status", "status" if any(row.lost for row in found.rows) else ""),
    )
    rows = tuple(_row_page_history(row, names) for row in found.rows)
    tones = tuple(_tone(row, more_is_better=found.metric.more_is_better) for row in found.rows)
    notes = [_turn_note(row, names) for row in found.rows if row.turns] + list(found.notes)
    about = about_part(found) | {"kind": "history", "shared": shared}
    lines = head_lines(found)
    if len(lines) > 4:
        span = f"{day(found.sweeps[0].ended_at)} to {day(found.sweeps[-1].ended_at)}"
        devices = ", ".join(sorted({device for one in found.sweeps for device in one.devices}))
        lines = [f"{len(names)} sweeps, {names[0]} to {names[-1]}, {span}, {devices}"]
    turned = sum(bool(row.turns) for row in found.rows)
    lines += [shared_line(shared), f"of {len(found.rows)} cells: {turned} changed their level"]
    return Page(about, tuple(lines), (Sheet("rows", "", columns, rows, tones),), tuple(notes))


def _row_page_history(row: Trend, names: Sequence[str]) -> tuple[object, ...]:
    valued = [cell for cell in row.cells if cell is not None and cell.value is not None]
    last = row.cells[-1]
    return (
        *case_values(row.cell),
        row.cell.direction,
        row.cell.result.label,
        row.n,
        valued[0].value,
        valued[-1].value,
        row.change,
        row.per_sweep,
        row.scatter,
        None,
        *row.relative,
        ", ".join(f"{written(turn.change, 'percent')} % at {names[turn.at]}" for turn in row.turns),
        "; ".join(str(one) for turn in row.turns for one in turn.coincides),
        last.result.status if last else "not measured",
    )


def _tone(row: Trend, *, more_is_better: bool) -> Tone:
    if row.lost:
        return "bad"
    if not row.turns:
        return ""
    return "good" if (row.turns[-1].change > 0) == more_is_better else "bad"


def _turn_note(row: Trend, names: Sequence[str]) -> str:
    said = []
    for turn in row.turns:
        around = "; ".join(map(str, turn.coincides)) or "no difference of the environment is recorded"
        said.append(f"{written(turn.change, 'percent')} % at {names[turn.at]}: {around}")
    return f"{row.cell.result.label} {row.cell.result.case.label()} {row.cell.direction} {', '.join(said)}"


def _curve(columns: Sequence[str]) -> Callable[[dict[str, Any]], str]:
    """What draws a row's relative values as one character a sweep, blank where there is none."""

    def draw(values: dict[str, Any]) -> str:
        present = [values[name] for name in columns if values[name] is not None]
        low, high = min(present), max(present)
        height = max(high - low, _FULL_HEIGHT)
        floor = (low + high - height) / 2
        return "".join(" " if values[name] is None else _level((values[name] - floor) / height) for name in columns)

    return draw


def _level(share: float) -> str:
    return _LEVELS[min(len(_LEVELS) - 1, max(0, math.floor(share * len(_LEVELS))))]


_YES_NO = {True: "yes", False: "no", None: "unknown"}


def published_page(found: Published) -> Page:
    """A row for each of our cells beside each figure of its shape."""
    shared, case = case_part([row.cell for row in found.rows])
    columns = (
        *case,
        Column("pass", "pass"),
        Column("backend", "ours"),
        Column("tflops", "ours TFLOPS", "figure"),
        Column("library", "published"),
        Column("version", "version", spare=2),
        Column("published_tflops", "their TFLOPS", "figure"),
        Column("ratio", "ratio", "ratio"),
        Column("published_gpu", "their GPU", spare=1),
        Column("gpu", ""),
        Column("same_gpu", "same GPU"),
        Column("same_library", ""),
        Column("source", ""),
        Column("job", ""),
    )
    rows = tuple(
        (
            *case_values(row.cell),
            row.cell.direction,
            row.cell.result.label,
            row.tflops,
            row.figure.library,
            row.figure.version,
            row.figure.tflops,
            row.ratio,
            row.figure.gpu,
            row.cell.result.device_name,
            _YES_NO[row.same_gpu],
            row.same_library,
            row.figure.source,
            row.cell.result.job,
        )
        for row in found.rows
    )
    about = about_part(found) | {"kind": "published", "figures": found.figures, "shared": shared}
    lines = (
        *head_lines(found),
        shared_line(shared),
        f"{len({id(row.figure) for row in found.rows})} of {found.figures} figures are of a shape measured here",
    )
    return Page(about, lines, (Sheet("rows", "", columns, rows),), found.notes)


def page(found: Comparison) -> Page:
    """The page of a comparison of any kind."""
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
