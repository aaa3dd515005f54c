"""Sheets: the rows of a comparison with columns that know their form. Every output shows the same sheets."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from attn_exp.core.text import figures, plain

# How a value is written; percent (two decimals and a sign) and half (one decimal) are of shares.
Form = Literal["text", "figure", "ratio", "percent", "half"]
Tone = Literal["good", "bad", "open", "best", ""]


@dataclass(frozen=True)
class Column:
    """One column: `name` in files and data frames, `head` in tables (empty: files alone), how its values are written.

    `spare` says how dispensable it is in a narrow table: the largest goes first, 0 never goes. `joined` makes one text
    of several values of the row, for tables alone.
    """

    name: str
    head: str
    form: Form = "text"
    spare: int = 0
    joined: Callable[[dict[str, Any]], str] | None = None


def printable(text: str) -> str:
    """Text on one line, without control characters: names and reasons may come from anywhere."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


@dataclass(frozen=True)
class Sheet:
    """Rows of values in the order of the columns; `tones` say how each row is coloured on a terminal."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    tones: tuple[Tone, ...] = ()

    def dictionaries(self) -> list[dict[str, Any]]:
        """The rows by the names of their columns, as files and data frames have them; numbers to six digits."""
        kept = [(index, column.name) for index, column in enumerate(self.columns) if column.joined is None]
        return [{name: rounded(row[index]) for index, name in kept} for row in self.rows]

    def texts(self) -> list[dict[str, str]]:
        """The rows by the heads of their columns, as tables have them."""
        shown = [(index, column) for index, column in enumerate(self.columns) if column.head]
        found = []
        for row in self.rows:
            values = {column.name: value for column, value in zip(self.columns, row, strict=True)}
            found.append(
                {
                    column.head: printable(column.joined(values) if column.joined else written(row[index], column.form))
                    for index, column in shown
                }
            )
        return found


@dataclass(frozen=True)
class Page:
    """A comparison ready to be written: what it is about, lines above, sheets (the first is the rows), notes below.

    `details` are sheets that only a report has room for, `detailed` the notes that say the same in fewer words.
    """

    about: dict[str, Any]
    lines: tuple[str, ...]
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]
    details: tuple[Sheet, ...] = ()
    detailed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A drawn chart for a report: what it shows, what one must know to read it, and itself as one SVG element."""

    title: str
    caption: str
    svg: str


def commands_of(sheet: Sheet) -> list[str] | None:
    """The commands of a sheet that has some, each once; None for any other sheet."""
    names = [column.name for column in sheet.columns]
    if "command" not in names:
        return None
    index = names.index("command")
    return list(dict.fromkeys(str(row[index]) for row in sheet.rows))


def written(value: Any, form: Form) -> str:
    """A value as tables show it; nothing for None."""
    if value is None or value == "":
        return ""
    if form == "text":
        return str(plain(value))
    if not math.isfinite(value):
        return str(value)
    if form == "figure":
        return figures(value) if value >= 1e-3 or value == 0 else f"{value:.3e}"
    if form == "ratio":
        return f"{value:.3f}" if value < 100 else f"{value:.0f}"
    if form == "percent":
        text = f"{100 * value:+.2f}" if abs(value) < 10 else f"{100 * value:+.0f}"
        return "+0.00" if text == "-0.00" else text
    return f"{100 * value:.1f}"


def rounded(value: Any) -> Any:
    """A value as files have it: fractions to six significant digits, sequences as text."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return str(value) if isinstance(value, (tuple, list)) else value


def interval(low: str, high: str, *, form: Form = "ratio", instead: str = "status") -> Callable[[dict[str, Any]], str]:
    """What joins two bounds to `[0.98, 1.02]`; where there are none, the column `instead` unless that is `ok`."""

    def join(values: dict[str, Any]) -> str:
        if values[low] is None or values[high] is None:
            return "" if values[instead] == "ok" else str(values[instead])
        return f"[{written(values[low], form)}, {written(values[high], form)}]"

    return join
