"""Details: what a report has room for beside the rows: flags, statuses with reasons, environments."""

from collections import Counter
from collections.abc import Sequence

from attn_exp.compare.cell import Cell
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.page_parts import differing_notes, reasons
from attn_exp.compare.sheet import Column, Page, Sheet, Tone
from attn_exp.flags import FLAGS, flag_notes


def detailed(page: Page, found: Comparison, cells: Sequence[Cell]) -> Page:
    """The page with its details, and the notes that those make superfluous."""
    results = list({id(cell.result): cell.result for cell in cells}.values())
    flags = [flag for result in results for flag in result.flags]
    sheets = [*_flags(Counter(flags)), *_statuses(cells), *_environments(found)]
    said = [*flag_notes(flags), *reasons(cells), *differing_notes(found)]
    return Page(page.about, page.lines, page.sheets, page.notes, tuple(sheets), frozenset(said))


def _flags(counts: Counter[str]) -> list[Sheet]:
    if not counts:
        return []
    columns = (Column("mark", "mark"), Column("flag", "flag"), Column("jobs", "jobs"), Column("says", "what it says"))
    rows = [(*(FLAGS[name][:1] if name in FLAGS else ("",)), name, counts[name], FLAGS.get(name, ("", ""))[1])
            for name in sorted(counts)]  # fmt: skip
    return [Sheet("flags", "flags", columns, tuple(rows))]


def _statuses(cells: Sequence[Cell]) -> list[Sheet]:
    results = {id(cell.result): cell.result for cell in cells}.values()
    counts = Counter((result.status, result.label, result.reason or "") for result in results)
    columns = (
        Column("status", "status"),
        Column("backend", "backend"),
        Column("jobs", "jobs"),
        Column("reason", "reason"),
    )
    order = sorted(counts, key=lambda one: (one[0] == "ok", one))
    rows = [(status, label, counts[status, label, reason], reason) for status, label, reason in order]
    tones: list[Tone] = ["" if status == "ok" else "bad" for status, *_ in rows]
    return [Sheet("statuses", "statuses", columns, tuple(rows), tuple(tones))]


def _environments(found: Comparison) -> list[Sheet]:
    """A row a fact, a column a sweep; what differs comes first."""
    by_sweep = [dict(one.environment) for one in found.sweeps]
    names = sorted({name for one in by_sweep for name in one})
    rows = [(name, *(one.get(name, "") for one in by_sweep)) for name in names]
    unlike = [len(set(row[1:])) > 1 for row in rows]
    columns = (
        Column("name", "environment"),
        *(Column(f"sweep{index}", one.name) for index, one in enumerate(found.sweeps)),
    )
    ordered = sorted(zip(rows, unlike, strict=True), key=lambda one: (not one[1], one[0][0]))
    tones: list[Tone] = ["open" if differs else "" for _, differs in ordered]
    return (
        [Sheet("environment", "environment", columns, tuple(row for row, _ in ordered), tuple(tones))] if rows else []
    )
