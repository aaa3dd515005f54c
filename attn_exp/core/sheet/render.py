"""Render a page as text for a terminal, Markdown, CSV, JSON or HTML, with the same numbers in all."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attn_exp.core.errors import UserError
from attn_exp.core.sheet import FORMATS
from attn_exp.core.sheet.grid import MARK, csv_of, fitted, grid, json_of, markdown_text
from attn_exp.core.sheet.sheet import Page, Picture, Sheet, Tone, commands_of
from attn_exp.core.sheet.web import html
from attn_exp.core.text import WIDTH, filled, printable, uncontrolled

# A terminal shows the first few duel commands; files have all.
_COMMANDS_SHOWN = 8
_COLOURS: dict[Tone, str] = {"good": "32", "bad": "31", "open": "33", "best": "1"}


def clean(page: Page) -> Page:
    """Return the page with each sentence on one line and without control characters: records may contain anything."""
    sheets = tuple(replace(sheet, title=printable(sheet.title)) for sheet in page.sheets)
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
        sheets=sheets,
        headline=headline,
        made_by=tuple(map(printable, page.made_by)),
    )


def table(page: Page, *, width: int = WIDTH, colour: bool = False, limit: int | None = None) -> str:
    """Render a page in `width` columns, with at most `limit` rows of the first sheet, coloured if requested."""
    own = page.headline
    parts = [_wrapped(own.answer, width)]
    if own.table is not None:
        below = _wrapped((own.table.title, own.table.note), width)
        parts.append(f"{_grid(own.table, width, colour, limit)}\n{below}")
    parts += [_wrapped((own.remains, own.command), width), _wrapped(page.lines, width)]
    for sheet in page.sheets:
        title = [sheet.title] if sheet.title else []
        if commands_of(sheet) is not None:
            parts.append("\n".join([*title, *_commands(sheet)]))
        else:
            parts.append("\n".join([*title, _grid(sheet, width, colour, limit)]))
    parts.append(_wrapped(page.notes, width))
    return "\n\n".join(part for part in parts if part)


def markdown(page: Page, *, limit: int | None = None) -> str:
    """Render a page for a pull request: tables with all columns, notes as a list."""
    own = page.headline
    parts = [_hard_lines(own.answer)]
    if own.table is not None:
        parts += [answer_markdown(own.table, limit), own.table.title.replace(f"{MARK} ", "bold: ")]
        parts.append(markdown_text(own.table.note))
    parts += [_hard_lines([own.remains]), f"```bash\n{own.command}\n```" if own.command else ""]
    parts.append(_hard_lines(page.lines))
    for sheet in page.sheets:
        title = [f"**{markdown_text(sheet.title)}**", ""] if sheet.title else []
        if commands_of(sheet) is not None:
            parts.append("\n".join([*title, "```bash", *_commands(sheet), "```"]))
            continue
        rows = sheet.texts(limit if sheet is page.sheets[0] else None)
        parts.append("\n".join([*title, grid(rows, _filled(rows, _heads(sheet)), "pipe"), *_more(sheet, rows, "\n")]))
    parts.append("\n".join(f"- {markdown_text(note)}" for note in page.notes))
    return "\n\n".join(part for part in parts if part)


def answer_markdown(table: Sheet, limit: int | None = None) -> str:
    """Return the table of an answer as Markdown, winners in bold."""
    rows = table.texts(limit)
    return "\n".join([grid(rows, _filled(rows, _heads(table)), "pipe", _right(table)), *_more(table, rows, "\n")])


def _right(sheet: Sheet) -> set[str]:
    return {column.head for column in sheet.columns if column.form == "right"}


def _hard_lines(lines: Sequence[str]) -> str:
    return "\n".join(f"{markdown_text(line)}  " for line in lines if line).rstrip()


def csv_text(page: Page, *, limit: int | None = None) -> str:
    """Return at most `limit` rows with all columns, fractions with six digits."""
    names = [column.name for column in page.sheets[0].columns if column.joined is None]
    return csv_of(names, page.sheets[0].dictionaries()[:limit]).rstrip("\n")


def json_text(page: Page, *, limit: int | None = None) -> str:
    """Return everything as JSON: the header, sheets as lists of objects (`limit` for the first), and the notes."""
    sheets = {sheet.name: sheet.dictionaries()[: limit if sheet is page.sheets[0] else None] for sheet in page.sheets}
    return json_of({**page.about, **sheets, "notes": list(page.notes)})


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
    """Render a page in the requested format, else in that of the file's ending; HTML includes `pictures`."""
    form, page = format_of(form, file), clean(page)
    if form == "csv":
        return csv_text(page, limit=limit)
    if form == "json":
        return json_text(page, limit=limit)
    if form == "markdown":
        return markdown(page, limit=limit)
    if form == "html":
        return html(page, pictures, limit=limit)
    return table(page, width=width, colour=colour, limit=limit)


def _grid(sheet: Sheet, width: int, colour: bool, limit: int | None) -> str:
    rows = sheet.texts(limit if sheet.name in ("rows", "answer") else None)
    spare = sorted((column for column in sheet.columns if column.spare and column.head), key=lambda one: -one.spare)
    heads, may_go = _filled(rows, _heads(sheet)), [column.head for column in spare]
    text, left_out = fitted(rows, heads, may_go, width, _right(sheet))
    shared = _shared_words([row.get("case", "") for row in rows]) if left_out and len(rows) > 1 else []
    if shared:
        # Room for more backends.
        rows = [row | {"case": " ".join(word for word in row["case"].split() if word not in shared)} for row in rows]
        text, left_out = fitted(rows, heads, may_go, width, _right(sheet))
    lines = text.splitlines()
    if colour and sheet.tones:
        # The lines are laid out without colours, which have no width.
        head = len(lines) - len(rows)
        lines[head:] = [
            f"\x1b[{_COLOURS[tone]}m{line}\x1b[0m" if tone in _COLOURS else line
            for line, tone in zip(lines[head:], sheet.tones, strict=False)
        ]
    lines += _more(sheet, rows)
    if shared:
        lines.append(filled(f"every case: {' '.join(shared)}", width))
    if left_out:
        lines.append(filled(f"omitted to fit the width: {', '.join(left_out)}", width))
    return "\n".join(lines)


def _shared_words(cases: Sequence[str]) -> list[str]:
    """Return the words that all cases have."""
    first, *others = (case.split() for case in cases)
    return [word for word in first if all(word in other for other in others)]


def _heads(sheet: Sheet) -> list[str]:
    return [column.head for column in sheet.columns if column.head]


def _filled(rows: Sequence[dict[str, str]], heads: Sequence[str]) -> list[str]:
    return [head for head in heads if any(row[head] for row in rows)] or list(heads)


def _more(sheet: Sheet, rows: Sequence[object], prefix: str = "") -> list[str]:
    rest = len(sheet.rows) - len(rows)
    return [f"{prefix}... and {rest} more rows: rows=all shows them"] if rest else []


def _commands(sheet: Sheet) -> list[str]:
    lines = commands_of(sheet) or []
    rest = len(lines) - _COMMANDS_SHOWN
    return lines[:_COMMANDS_SHOWN] + ([f"# ... and {rest} more: format=json has all"] if rest > 0 else [])


def _wrapped(lines: Sequence[str], width: int) -> str:
    return "\n".join(filled(line, width) for line in lines if line)
