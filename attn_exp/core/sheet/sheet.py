"""Sheets: rows in formatted columns. All tables are sheets, and all output formats show the same ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attn_exp.core.case.case import TYPED_DTYPES
from attn_exp.core.text import figures, half_text, percent_text, plain, printable, uncontrolled

# The mark before a winner's value; pages show such a value in bold.
MARK = "*"
# How a value is formatted; `right` is text that is aligned right, `markdown` text that is Markdown, `percent`
# (signed, two decimals) and `half` (one decimal) take fractions, and `dtype` PyTorch's name.
Form = Literal["text", "right", "markdown", "dtype", "figure", "ratio", "percent", "half"]
Tone = Literal["good", "bad", "open", "best", ""]
# A larger ratio is the bound of an interval of two or three rounds, and tells nothing.
_LARGEST = 100_000
# Bounds of a ratio of two values that are known to +-25 % differ by no more than this.
_WIDEST = 2.5


@dataclass(frozen=True)
class Column:
    """One column: `name` in files and data frames, `head` in tables (empty: only in files), and the value's format.

    `spare` ranks columns that a narrow table may omit: the largest first, 0 never. `joined` makes one text of several
    values of the row; such a column exists only in tables. Cells fold at `fold` columns of a terminal.
    """

    name: str
    head: str = ""
    form: Form = "text"
    spare: int = 0
    joined: Callable[[dict[str, Any]], str] | None = None
    fold: int | None = None


@dataclass(frozen=True)
class Sheet:
    """Rows of values in the order of the columns; `tones` are the rows' colours on a terminal, `note` a line below."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    tones: tuple[Tone, ...] = ()
    note: str = ""

    def dictionaries(self) -> list[dict[str, Any]]:
        """Return the rows by column name, as files and data frames have them; numbers with six digits."""
        kept = [(index, column.name) for index, column in enumerate(self.columns) if column.joined is None]
        return [{name: rounded(row[index]) for index, name in kept} for row in self.rows]

    def texts(self, limit: int | None = None) -> list[dict[str, str]]:
        """Return the rows, or the first `limit` of them, by column head, as tables show them."""
        shown = [(index, column) for index, column in enumerate(self.columns) if column.head]
        texts = []
        for row in self.rows[:limit]:
            values = {column.name: value for column, value in zip(self.columns, row, strict=True)}
            texts.append(
                {
                    column.head: printable(column.joined(values) if column.joined else written(row[index], column.form))
                    for index, column in shown
                }
            )
        return texts

    def filled(self, texts: Sequence[Mapping[str, str]]) -> list[Column]:
        """Return the columns of tables that are not empty in all of some rows; all, if each is."""
        shown = [column for column in self.columns if column.head]
        return [column for column in shown if any(row[column.head] for row in texts)] or shown


def sheet_of(rows: Sequence[Mapping[str, Any]], spare: Sequence[str] = ()) -> Sheet:
    """Return the sheet of rows by column head; a narrow table may omit the columns `spare`, the first of them first."""
    ranks = {name: len(spare) - at for at, name in enumerate(spare)}
    columns = tuple(Column(name, name, spare=ranks.get(name, 0)) for name in (rows[0] if rows else ()))
    return Sheet("rows", "", columns, tuple(tuple(row.values()) for row in rows))


# A column, and what gets its value from an item of the rows; nothing for a `joined` one.
Pairs = Sequence[tuple[Column, Callable[[Any], Any] | None]]


def split(pairs: Pairs) -> tuple[tuple[Column, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the columns, and a function that gets their values from an item."""
    gets = [get or (lambda _: None) for _, get in pairs]
    return tuple(column for column, _ in pairs), lambda item: tuple(get(item) for get in gets)


@dataclass(frozen=True)
class Headline:
    """The headline of a comparison: the answer in sentences, warnings, and the command that decides the rest.

    `remains` says what the command is for; both are empty if nothing is open. `table` shows the answer.
    """

    answer: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    remains: str = ""
    command: str = ""
    table: Sheet | None = None


@dataclass(frozen=True)
class Page:
    """A comparison ready for output: the headline, lines, sheets (the first has the rows), notes below.

    `about` is the header of the JSON output. The others are for the HTML report: `details` are its further sheets,
    `detailed` the notes that they make redundant, and `made_by` the commands that made it.
    """

    about: dict[str, Any]
    lines: tuple[str, ...]
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]
    details: tuple[Sheet, ...] = ()
    detailed: frozenset[str] = frozenset()
    headline: Headline = Headline()
    made_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A chart in a report: its title, its caption, and the chart itself as one SVG element.

    A `titled` one has title and caption within the element: the report's own are for screen readers only.
    """

    title: str
    caption: str
    svg: str
    titled: bool = False


def commands_of(sheet: Sheet) -> list[str] | None:
    """Return the distinct commands of a sheet that has some, or None for any other sheet."""
    names = [column.name for column in sheet.columns]
    if "command" not in names:
        return None
    index = names.index("command")
    return list(dict.fromkeys(uncontrolled(str(row[index])) for row in sheet.rows))


def written(value: Any, form: Form) -> str:
    """Format a value for tables; None becomes an empty text."""
    if value is None or value == "":
        return ""
    if form in ("text", "right", "markdown"):
        return str(plain(value))
    if form == "dtype":
        return TYPED_DTYPES.get(value, str(value))
    if not math.isfinite(value):
        return str(value)
    if form == "figure":
        return figures(value) if value >= 1e-3 or value == 0 else f"{value:.3e}"
    if form == "ratio":
        return f"{value:.3f}" if value < 100 else f"{value:.0f}" if value < _LARGEST else f">{_LARGEST - 1}"
    if form == "percent":
        return percent_text(value)
    return half_text(value)


def is_number(text: str) -> bool:
    """Return whether a cell is a number, perhaps a bound such as `>25`, or empty."""
    text = text.lstrip(">+-")
    return not text or text.replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1).isdigit()


def of_all(some: int, every: int) -> str:
    """Return how many of all cases: the number, or `3 of 12` if they are not all."""
    return str(some) if some == every else f"{some} of {every}"


def rounded(value: Any) -> Any:
    """Return a value as files have it: fractions with six significant digits, sequences as text."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return str(value) if isinstance(value, (tuple, list)) else value


def interval(
    low: str, high: str, *, form: Form = "ratio", instead: str | None = "status"
) -> Callable[[dict[str, Any]], str]:
    """Return a function that formats two bounds as `[0.98, 1.02]`, or column `instead` if there are none.

    The text is empty if `instead` is None or its column has `ok`, and `?` for ratios of which nothing is known.
    """

    def join(values: dict[str, Any]) -> str:
        if values[low] is None or values[high] is None:
            return "" if instead is None or values[instead] == "ok" else str(values[instead])
        if form == "ratio" and values[high] > _WIDEST * values[low]:
            return "?"
        return f"[{written(values[low], form)}, {written(values[high], form)}]"

    return join
