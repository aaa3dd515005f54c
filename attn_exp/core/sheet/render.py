"""The one way that sheets and pages become text: for a terminal, as Markdown, CSV, JSON or HTML.

All formats have the same numbers, and each escapes what it would take for more than text.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from attn_exp.core.errors import UserError
from attn_exp.core.sheet import FORMATS
from attn_exp.core.sheet.sheet import MARK, Column, Page, Picture, Sheet, Tone, commands_of, is_number
from attn_exp.core.sheet.web import html
from attn_exp.core.text import WIDTH, filled, printable, uncontrolled

# A terminal shows the first few duel commands; files have all.
_COMMANDS_SHOWN = 8
_COLOURS: dict[Tone, str] = {"good": "32", "bad": "31", "open": "33", "best": "1"}
# A spreadsheet takes this for a formula (OWASP, CSV injection); numbers may begin with a sign.
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.]|inf|nan)")
# Not brackets that no address can follow, as those of an interval, nor underscores, which mean nothing within a word.
_MARKED_UP = re.compile(r"([\\`*|]|\](?=[(\[:])|~(?=~))")


def grid(sheet: Sheet) -> str:
    """Return the table of a sheet for a terminal, however wide, without columns that are empty."""
    texts = sheet.texts()
    return _grid(sheet.filled(texts), texts, "simple")


def fitted(sheet: Sheet, width: int, texts: Sequence[Mapping[str, str]] | None = None) -> tuple[str, list[str]]:
    """Return the table of a sheet in `width` columns, and the heads left out to fit; the most spare go first.

    `texts` are the rows as tables show them, by default those of the sheet.
    """
    texts = sheet.texts() if texts is None else texts
    kept, left_out = sheet.filled(texts), list[Column]()
    waiting = sorted((column for column in kept if column.spare), key=lambda column: -column.spare)
    while waiting and len(kept) > 1 and _width(kept, texts) > width:
        left_out.append(waiting.pop(0))
        kept.remove(left_out[-1])
    # Still too wide: what stands last, but the first columns and the marks, so that no line is broken within a number.
    while len(kept) > 3 and _width(kept, texts) > width:
        left_out.append(kept.pop(-2))
    return _grid(kept, texts, "simple"), [" ".join(column.head.split()) for column in left_out]


def _grid(columns: Sequence[Column], texts: Sequence[Mapping[str, str]], form: Literal["simple", "pipe"]) -> str:
    """Return some columns of all rows, numbers aligned right: `simple` for a terminal, `pipe` for Markdown."""
    from tabulate import tabulate

    right = [column.form == "right" or all(is_number(row[column.head]) for row in texts) for column in columns]
    if form == "pipe":
        heads = [markdown_text(_head(column)) for column in columns]
        cells = [[_markdown_cell(row[column.head], column) for column in columns] for row in texts]
    else:
        heads = [_head(column).replace("_", "\n") for column in columns]
        cells = [[row[column.head] for column in columns] for row in texts]
    return tabulate(
        cells,
        headers=heads,
        tablefmt=form,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in right] if texts else None,
        maxcolwidths=[column.fold for column in columns] if any(column.fold for column in columns) else None,
    )


def _head(column: Column) -> str:
    """Return a head, which may have several lines, without what commands a terminal."""
    return "\n".join(map(printable, column.head.split("\n")))


def _width(columns: Sequence[Column], texts: Sequence[Mapping[str, str]]) -> int:
    """Return the width of tabulate's `simple` form, which puts two spaces between columns."""
    heads = [_head(column).replace("_", "\n").split("\n") for column in columns]
    widths = [
        max(2 + max(map(len, lines)), max((len(row[column.head]) for row in texts), default=0))
        for column, lines in zip(columns, heads, strict=True)
    ]
    return sum(widths) + 2 * (len(columns) - 1)


def _markdown_cell(text: str, column: Column) -> str:
    if column.form == "markdown":
        return text
    marked = text.startswith(MARK) and text != MARK
    return f"**{markdown_text(text.removeprefix(MARK))}**" if marked else markdown_text(text)


def markdown_text(text: str) -> str:
    """Return text, on one line, that Markdown shows literally: no link, image, tag or emphasis."""
    return _MARKED_UP.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))


def sheet_markdown(sheet: Sheet, limit: int | None = None) -> str:
    """Return a sheet as Markdown, which shows heads and cells literally, and winners in bold."""
    texts = sheet.texts(limit)
    return "\n".join([_grid(sheet.filled(texts), texts, "pipe"), *_more(sheet, texts, "\n")])


def sheet_csv(sheet: Sheet, limit: int | None = None) -> str:
    """Return a sheet as CSV: fractions with six digits, and an apostrophe before what a spreadsheet would run."""
    names = [column.name for column in sheet.columns if column.joined is None]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([names, *(map(_no_formula, row.values()) for row in sheet.dictionaries()[:limit])])
    return buffer.getvalue()


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def json_of(whole: Any) -> str:
    """Return data as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()


def text_of(
    page: Page,
    form: str | None = None,
    file: str | None = None,
    *,
    colour: bool = False,
    limit: int | None = None,
    pictures: Iterable[Picture] = (),
    width: int = WIDTH,
) -> str:
    """Render a page in the requested format, else in that of the file's ending.

    It has at most `limit` rows of the answer's table and of the first sheet. Only text for a terminal has a `width` and
    may have colours, and only HTML includes `pictures`.
    """
    form, page = format_of(form, file), _clean(page)
    if form == "csv":
        return sheet_csv(page.sheets[0], limit).rstrip("\n")
    if form == "json":
        first, *others = page.sheets
        sheets = {first.name: first.dictionaries()[:limit]} | {sheet.name: sheet.dictionaries() for sheet in others}
        return json_of({**page.about, **sheets, "notes": list(page.notes)})
    if form == "markdown":
        return _markdown(page, limit)
    return html(page, pictures, limit=limit) if form == "html" else _table(page, width, colour, limit)


def format_of(form: str | None, file: str | None) -> str:
    """Return the requested format, else that of the file's ending, else `table`.

    Raises UserError if the ending is unknown and no format was requested.
    """
    ending = Path(file).suffix if file else ""
    named = next((name for name, own in FORMATS.items() if own == ending), None)
    if not form and not named and ending:
        endings = ", ".join(FORMATS.values())
        raise UserError(f"out={file} has none of the endings {endings}: add format={'|'.join(FORMATS)}")
    return form or named or "table"


def _clean(page: Page) -> Page:
    """Return the page with each sentence on one line and without control characters: records may contain anything."""
    own = page.headline
    headline = replace(
        own,
        answer=tuple(map(printable, own.answer)),
        warnings=tuple(map(printable, own.warnings)),
        remains=printable(own.remains),
        command=uncontrolled(own.command),
    )
    return replace(
        page,
        lines=tuple(map(printable, page.lines)),
        notes=tuple(map(printable, page.notes)),
        sheets=tuple(replace(sheet, title=printable(sheet.title)) for sheet in page.sheets),
        headline=headline,
        made_by=tuple(map(printable, page.made_by)),
    )


def _table(page: Page, width: int, colour: bool, limit: int | None) -> str:
    own = page.headline
    parts = [_wrapped(own.answer, width)]
    if own.table is not None:
        below = _wrapped((own.table.title, own.table.note), width)
        parts.append(f"{_sheet_text(own.table, width, colour, limit)}\n{below}")
    parts += [_wrapped((own.remains, own.command), width), _wrapped(page.lines, width)]
    for sheet in page.sheets:
        shown = limit if sheet is page.sheets[0] else None
        lines = _commands(sheet) or [_sheet_text(sheet, width, colour, shown)]
        parts.append("\n".join(filter(None, [sheet.title, *lines])))
    parts.append(_wrapped(page.notes, width))
    return "\n\n".join(filter(None, parts))


def _markdown(page: Page, limit: int | None) -> str:
    """Render a page for a pull request: tables with all columns, notes as a list."""
    own = page.headline
    parts = [_hard_lines(own.answer)]
    if own.table is not None:
        parts += [sheet_markdown(own.table, limit), own.table.title.replace(f"{MARK} ", "bold: ")]
        parts.append(markdown_text(own.table.note))
    parts += [_hard_lines([own.remains]), f"```bash\n{own.command}\n```" if own.command else ""]
    parts.append(_hard_lines(page.lines))
    for sheet in page.sheets:
        title = [f"**{markdown_text(sheet.title)}**", ""] if sheet.title else []
        commands, shown = _commands(sheet), limit if sheet is page.sheets[0] else None
        lines = ["```bash", *commands, "```"] if commands else [sheet_markdown(sheet, shown)]
        parts.append("\n".join([*title, *lines]))
    parts.append("\n".join(f"- {markdown_text(note)}" for note in page.notes))
    return "\n\n".join(filter(None, parts))


def _hard_lines(lines: Sequence[str]) -> str:
    return "\n".join(f"{markdown_text(line)}  " for line in lines if line).rstrip()


def _sheet_text(sheet: Sheet, width: int, colour: bool, limit: int | None) -> str:
    texts = sheet.texts(limit)
    text, left_out = fitted(sheet, width, texts)
    shared = _shared_words([row.get("case", "") for row in texts]) if left_out and len(texts) > 1 else []
    if shared:
        # Room for more backends.
        texts = [row | {"case": " ".join(word for word in row["case"].split() if word not in shared)} for row in texts]
        text, left_out = fitted(sheet, width, texts)
    lines = text.splitlines()
    if colour and sheet.tones:
        # The lines are laid out without colours, which have no width.
        head = len(lines) - len(texts)
        lines[head:] = [
            f"\x1b[{_COLOURS[tone]}m{line}\x1b[0m" if tone in _COLOURS else line
            for line, tone in zip(lines[head:], sheet.tones, strict=False)
        ]
    lines += _more(sheet, texts)
    if shared:
        lines.append(filled(f"every case: {' '.join(shared)}", width))
    if left_out:
        lines.append(filled(f"omitted to fit the width: {', '.join(left_out)}", width))
    return "\n".join(lines)


def _shared_words(cases: Sequence[str]) -> list[str]:
    first, *others = (case.split() for case in cases)
    return [word for word in first if all(word in other for other in others)]


def _more(sheet: Sheet, rows: Sequence[object], prefix: str = "") -> list[str]:
    rest = len(sheet.rows) - len(rows)
    return [f"{prefix}... and {rest} more rows: rows=all shows them"] if rest else []


def _commands(sheet: Sheet) -> list[str]:
    """Return the first commands of a sheet that has some; none of any other sheet."""
    lines = commands_of(sheet) or []
    rest = len(lines) - _COMMANDS_SHOWN
    return lines[:_COMMANDS_SHOWN] + ([f"# ... and {rest} more: format=json has all"] if rest > 0 else [])


def _wrapped(lines: Sequence[str], width: int) -> str:
    return "\n".join(filled(line, width) for line in lines if line)
