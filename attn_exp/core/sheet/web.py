"""Web: a page as one HTML file that needs no network, with tables to sort and filter, and pictures inside.

The template escapes all text from records, and no record becomes an address. The page's policy forbids the browser to
run any script but its own, or to fetch anything.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from attn_exp.core.sheet.sheet import MARK, Column, Page, Picture, Sheet, Tone, commands_of, is_number

if TYPE_CHECKING:
    from jinja2 import Template

_LONG = 60
# The number of rows that a notebook shows.
_FIRST_ROWS = 10
# The question that each kind of comparison answers, for the title.
_KINDS = {"rivals": "which backend is best where", "changes": "what changed", "history": "history"}


@dataclass(frozen=True)
class _Section:
    """A sheet as the template takes it: its commands, or a table's heads and cells with their column's kind."""

    anchor: str
    title: str
    commands: Sequence[str] | None = None
    heads: Sequence[tuple[str, str]] = ()
    rows: Sequence[tuple[Tone, Sequence[tuple[str, str]]]] = ()
    left_out: int = 0
    note: str = ""


def html(page: Page, pictures: Iterable[Picture] = (), *, limit: int | None = None) -> str:
    """Return the report, with at most `limit` rows of the first sheet."""
    first, *others = page.sheets
    headline, table = page.headline, page.headline.table
    if table is not None:
        table = replace(table, title=table.title.replace(f"{MARK} ", "bold: "))
    script = _asset("report.js")
    return _template("report.html.jinja").render(
        title=f"{', '.join(str(one['name']) for one in page.about['sweeps'])}: {_KINDS[page.about['kind']]}",
        headline=headline,
        table=_section("answer", table, limit) if table is not None else None,
        lines=[line for line in page.lines if line],
        made_by=page.made_by,
        notes=[note for note in page.notes if note not in page.detailed],
        rows=_section("s0", first, limit),
        summaries=[_section(f"s{index}", sheet) for index, sheet in enumerate(others, 1)],
        details=[_section(f"d{index}", sheet) for index, sheet in enumerate(page.details)],
        pictures=list(pictures),
        policy=_policy(script),
        style=_asset("report.css"),
        script=script,
    )


def html_table(title: str, sheet: Sheet) -> str:
    """Return a title, a table of a sheet's first rows and how many follow, as HTML for a notebook's cell."""
    rows = sheet.texts(_FIRST_ROWS)
    numbers = [name for name in (rows[0] if rows else ()) if all(is_number(row[name]) for row in rows)]
    values = {"title": title, "rows": rows, "numbers": numbers, "left_out": len(sheet.rows) - len(rows)}
    return _template("table.html.jinja").render(values)


@cache
def _template(name: str) -> "Template":
    """Return a Jinja2 template of this folder; it escapes all text that is not marked safe."""
    # Importing Jinja2 takes longer than printing a table.
    from jinja2 import Environment, StrictUndefined

    return Environment(autoescape=True, undefined=StrictUndefined).from_string(_asset(name))


@cache
def _asset(name: str) -> str:
    return files("attn_exp.core.sheet").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """No network, no script but ours; styles may stand in the page, as matplotlib writes them."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _section(anchor: str, sheet: Sheet, limit: int | None = None) -> _Section:
    title = sheet.title.rstrip(":") or "rows"
    if (commands := commands_of(sheet)) is not None:
        return _Section(anchor, title, commands)
    rows = sheet.texts(limit)
    columns = sheet.filled(rows)
    kinds = [_kind(column, [row[column.head] for row in rows]) for column in columns]
    cells = [[(kind, row[column.head]) for column, kind in zip(columns, kinds, strict=True)] for row in rows]
    blank: Tone = ""
    tones = sheet.tones or (blank,) * len(rows)
    return _Section(
        anchor,
        title,
        heads=[(column.head, kind) for column, kind in zip(columns, kinds, strict=True)],
        rows=list(zip(tones, cells, strict=False)),
        left_out=len(sheet.rows) - len(rows),
        note=sheet.note,
    )


def _kind(column: Column, texts: Sequence[str]) -> str:
    if column.form not in ("text", "dtype"):
        return "num"
    filled = [text for text in texts if text]
    if filled and all(text.lstrip("+-").replace(".", "", 1).isdigit() for text in filled):
        return "num"
    return "long" if any(len(text) > _LONG for text in filled) else ""
