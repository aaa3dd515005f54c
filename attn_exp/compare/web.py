"""Web: a page as one HTML file that needs no network, with tables to sort and filter, and charts inside.

All that comes from records is escaped, nothing becomes an address, and the page's policy forbids the browser to run any
other script than its own, or to fetch anything.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from attn_exp.compare.sheet import Column, Page, Sheet, commands_of

if TYPE_CHECKING:
    from attn_exp.plots.style import Chart

_LONG = 60


def html(page: Page, charts: "Iterable[Chart]" = (), *, limit: int | None = None) -> str:
    """The report; at most `limit` rows of the first sheet."""
    drawn = list(charts)
    sections = [_section(f"s{index}", sheet, limit if index == 0 else None) for index, sheet in enumerate(page.sheets)]
    details = [_section(f"d{index}", sheet, None) for index, sheet in enumerate(page.details)]
    notes = [note for note in page.notes if note not in page.detailed]
    # What one decides by comes first, then the pictures, then all rows, then what they rest on.
    order = [*sections[1:], _charts(drawn), *sections[:1], *details, _notes(notes)]
    named = [(f"s{index}", sheet.title or "rows") for index, sheet in enumerate(page.sheets)]
    links = [
        *named[1:],
        *([("charts", "plots")] if drawn else []),
        *named[:1],
        *((f"d{index}", sheet.title) for index, sheet in enumerate(page.details)),
    ]
    title = f"{', '.join(str(one['name']) for one in page.about['sweeps'])}: {page.about['kind']}"
    style, script = _asset("report.css"), _asset("report.js")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_policy(script))}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(line)}</p>" for line in page.lines if line),
            "<nav>" + "".join(f'<a href="#{anchor}">{escape(text)}</a>' for anchor, text in links) + "</nav>",
            *(part for part in order if part),
            f"<script>{script}</script>",
            "</body></html>",
        ]
    )


def _policy(script: str) -> str:
    """No network, no script but ours; styles may stand in the page, as matplotlib writes them."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> str:
    return files("attn_exp.compare").joinpath(name).read_text(encoding="utf-8")


def _section(anchor: str, sheet: Sheet, limit: int | None) -> str:
    head = f'<section id="{anchor}"><h2>{escape(sheet.title or "rows")} <span class="soft count"></span></h2>'
    if (lines := commands_of(sheet)) is not None:
        return f"{head}<pre>{escape(chr(10).join(lines))}</pre></section>"
    return f"{head}{_table(sheet, limit)}</section>"


def _table(sheet: Sheet, limit: int | None) -> str:
    texts = sheet.texts()
    rows = texts[:limit]
    by_head = {column.head: column for column in sheet.columns if column.head}
    heads = [head for head in by_head if any(row[head] for row in rows)] or list(by_head)
    kinds = [_kind(by_head[head], [row[head] for row in rows]) for head in heads]
    opening = [f'<td class="{kind}">' if kind else "<td>" for kind in kinds]
    tones = sheet.tones or ("",) * len(texts)
    lines = [
        f'<tr class="{tone}">' + "".join(f"{tag}{escape(row[head])}" for tag, head in zip(opening, heads, strict=True))
        for row, tone in zip(rows, tones, strict=False)
    ]
    top = "".join(
        f'<th scope="col" class="{kind}">{escape(head)}</th>' for head, kind in zip(heads, kinds, strict=True)
    )
    rest = len(texts) - len(rows)
    more = f'<p class="soft">... and {rest} more rows: rows=all shows them</p>' if rest else ""
    table = f'<table class="sortable"><thead><tr>{top}</tr></thead><tbody>{chr(10).join(lines)}</tbody></table>'
    return f'<div class="table" tabindex="0">{table}</div>{more}'


def _kind(column: Column, texts: Sequence[str]) -> str:
    if column.form != "text":
        return "num"
    filled = [text for text in texts if text]
    if filled and all(text.lstrip("+-").replace(".", "", 1).isdigit() for text in filled):
        return "num"
    return "long" if any(len(text) > _LONG for text in filled) else ""


def _charts(drawn: "Sequence[Chart]") -> str:
    if not drawn:
        return ""
    from attn_exp.plots.style import svg

    labels = [escape(f"{one.title}. {one.caption}") for one in drawn]
    figures = [
        f'<figure role="img" aria-label="{label}">{svg(one)}</figure>' for label, one in zip(labels, drawn, strict=True)
    ]
    return '<section id="charts"><h2>plots</h2><div class="charts">' + "".join(figures) + "</div></section>"


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return "<section><h2>notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul></section>"
