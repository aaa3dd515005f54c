"""The one way that rows become text: grids for terminals and Markdown, CSV, JSON, and tables for notebooks.

Each escapes what its format would take for more than text.
"""

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from attn_exp.core.text import printable

if TYPE_CHECKING:
    from jinja2 import Template

# The mark before a winner's value; pages show such a value in bold.
MARK = "*"
# A spreadsheet takes this for a formula (OWASP, CSV injection); numbers may begin with a sign.
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.]|inf|nan)")


def grid(
    rows: Sequence[Mapping[str, Any]],
    shown: Sequence[str],
    form: Literal["simple", "pipe"] = "simple",
    right: Collection[str] = (),
    widths: Sequence[int | None] | None = None,
    *,
    literal: bool = True,
) -> str:
    """Return the columns `shown` of all rows, numbers and `right` aligned right.

    `simple` is for a terminal, where cells fold at `widths`. `pipe` is Markdown, which shows heads and cells literally,
    unless they are Markdown themselves; a cell that begins with `MARK` is bold.
    """
    from tabulate import tabulate

    numbers = [name in right or all(_is_number(row[name]) for row in rows) for name in shown]
    heads, cells = [_head(name) for name in shown], [[_text(row[name]) for name in shown] for row in rows]
    if form == "pipe" and literal:
        heads, cells = [markdown_text(head) for head in heads], [[_bold(cell) for cell in row] for row in cells]
    return tabulate(
        cells,
        headers=heads if form == "pipe" else [head.replace("_", "\n") for head in heads],
        tablefmt=form,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numbers] if rows else None,
        maxcolwidths=widths,
    )


def _bold(text: str) -> str:
    marked = text.startswith(MARK) and text != MARK
    return f"**{markdown_text(text.removeprefix(MARK))}**" if marked else markdown_text(text)


# The number of rows that a notebook shows.
FIRST_ROWS = 10


def html_table(title: str, rows: Sequence[Mapping[str, Any]], *, total: int) -> str:
    """Return a title, a table of the first of `total` rows and how many follow, as HTML for a notebook's cell."""
    numbers = [name for name in (rows[0] if rows else ()) if all(_is_number(row[name]) for row in rows)]
    values = {"title": title, "rows": rows, "numbers": numbers, "left_out": total - len(rows)}
    return template("attn_exp.core.sheet", "table.html.jinja").render(values)


@cache
def template(package: str, name: str) -> "Template":
    """Return a Jinja2 template from a file of a package; it escapes all text that is not marked safe."""
    # Importing Jinja2 takes longer than printing a table.
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined

    source = files(package).joinpath(name).read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(source)


def fitted(
    rows: Sequence[Mapping[str, Any]],
    shown: Sequence[str],
    dispensable: Sequence[str],
    width: int,
    right: Collection[str] = (),
) -> tuple[str, list[str]]:
    """Return the grid in `width` columns, and the names left out to fit; the first of `dispensable` goes first."""
    kept, left_out = list(shown), []
    waiting = [name for name in dispensable if name in kept]
    while waiting and len(kept) > 1 and _width(rows, kept) > width:
        left_out.append(waiting.pop(0))
        kept.remove(left_out[-1])
    # Still too wide: what stands last, but the first columns and the marks, so that no line is broken within a number.
    while len(kept) > 3 and _width(rows, kept) > width:
        left_out.append(kept.pop(-2))
    return grid(rows, kept, right=right), left_out


def _width(rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> int:
    """Return the width of tabulate's `simple` form, which puts two spaces between columns."""
    widths = [max((len(line) for line in _head(name).replace("_", "\n").split("\n")), default=0) + 2 for name in shown]
    for index, name in enumerate(shown):
        widths[index] = max(widths[index], max((len(_text(row[name])) for row in rows), default=0))
    return sum(widths) + 2 * (len(shown) - 1)


def _text(value: Any) -> str:
    return "" if value is None else printable(str(value))


def _head(name: str) -> str:
    """Return a head, which may have several lines, without what commands a terminal."""
    return "\n".join(map(printable, name.split("\n")))


def _is_number(value: Any) -> bool:
    text = _text(value).lstrip(">+-")
    return not text or text.replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1).isdigit()


def csv_of(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV; an apostrophe keeps a spreadsheet from running text as a formula."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([names, *([_no_formula(row.get(name, "")) for name in names] for row in rows)])
    return buffer.getvalue()


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def json_of(whole: Any) -> str:
    """Return data as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()


# Not brackets that no address can follow, as those of an interval, nor underscores, which mean nothing within a word.
_MARKED_UP = re.compile(r"([\\`*|]|\](?=[(\[:])|~(?=~))")


def markdown_text(text: str) -> str:
    """Return text, on one line, that Markdown shows literally: no link, image, tag or emphasis."""
    return _MARKED_UP.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))
