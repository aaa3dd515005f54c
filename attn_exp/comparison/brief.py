"""A sweep in brief, as Markdown: its answer, and what its cases share."""

from attn_exp.comparison.page_parts import shared_line, shared_values
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.sheet.render import markdown_text, sheet_markdown
from attn_exp.core.sheet.sheet import MARK
from attn_exp.core.text import printable

# A description has room for a table of so many rows.
_ROWS = 40


def answer_in_brief(rivals: Rivals) -> str:
    """Return the answer of a sweep as Markdown: headline, table, and the command that decides what is too close."""
    answer = rivals.answer
    said, command = answer.next_step()
    parts = ["  \n".join(f"**{safe(line)}**" for line in answer.headline())]
    if answer.won:
        parts += [sheet_markdown(rivals.table, _ROWS), safe(rivals.table.title.replace(f"{MARK} ", "bold: "))]
        parts.append(safe(rivals.table.note))
    # In one paragraph: MLflow shows 100 pixels of a description, and folds the rest.
    parts.append(" ".join([safe(said), *([inline_code(command)] if command else [])]))
    return "\n\n".join(filter(None, parts))


def shared_in_brief(rivals: Rivals) -> str:
    """Return what all rows share, as Markdown; the report has the tables."""
    shared = safe(shared_line(shared_values([row.cell for row in rivals.rows])))
    return f"All cases: {shared}." if shared else ""


def inline_code(text: str) -> str:
    """Return a line as Markdown that shows it literally, in several lines where a block would be cut off."""
    line = printable(text)
    return f"`{line}`" if "`" not in line else f"`` {line} ``"


def safe(text: str) -> str:
    """Return text on one line that Markdown shows literally."""
    return markdown_text(printable(text))
