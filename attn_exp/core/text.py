"""Text that all tables share: figures, grids and labels."""

import contextlib
import json
import math
import os
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from jinja2 import Template


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options under dotted names."""
    flattened: dict[str, Any] = {}
    for name, value in options.items():
        flattened |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flattened


def word(value: Any) -> str:
    """Return a value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(word, value))}]"
    return str(value)


def unique_labels(labels: Sequence[str], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return unique labels: where one stands for several sets of (flat) options, add the options that differ."""
    sets: dict[str, dict[str, Mapping[str, Any]]] = {}
    for label, own in zip(labels, options, strict=True):
        sets.setdefault(label, {}).setdefault(json.dumps(own, sort_keys=True), own)
    several = {label: _differing(list(own.values())) for label, own in sets.items() if len(own) > 1}
    return [
        f"{label}({_typed(own, several[label])})" if label in several else label
        for label, own in zip(labels, options, strict=True)
    ]


def _typed(options: Mapping[str, Any], names: Sequence[str]) -> str:
    return ",".join(f"{name}={word(options.get(name))}" for name in names)


def _differing(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for options in sets for name in options})
    return [name for name in names if len({json.dumps(options.get(name)) for options in sets}) > 1]


WIDTH = 120
SHORT = {"forward": "fwd", "backward": "bwd", "step": "step"}


# Of a value with a wider interval, two digits are known; one above the second was not measured well enough.
_TWO_DIGITS, _UNKNOWN = 0.1, 0.25


def figures(value: float, half: float | None = None) -> str:
    """Format with four significant digits, or two if the relative half-width is large, and without an exponent."""
    if half is not None and half > _TWO_DIGITS:
        value = float(f"{value:.2g}")
        return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    if value >= 1000:
        return f"{value:.0f}"
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(digits, 6)}f}"


def duration(seconds: float) -> str:
    """Format a duration: `48 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def half_text(half: float | None) -> str:
    """Format a relative half-width, the `+-%` of all tables, in percent."""
    return "" if half is None else f"{100 * half:.1f}" if half <= _UNKNOWN else ">25"


def percent_text(fraction: float) -> str:
    """Format a signed relative difference in percent; one that is a thousandfold or more, as a bound."""
    if abs(fraction) >= 1000:
        return f"{'>+' if fraction > 0 else '<-'}99999"
    text = f"{100 * fraction:+.2f}" if abs(fraction) < 10 else f"{100 * fraction:+.0f}"
    return "+0.00" if text == "-0.00" else text


def apart(found: float, allowed: float) -> tuple[str, str]:
    """Format two different numbers with two significant digits, or with as many as tell one from the other."""
    for digits in range(2, 17):
        texts = f"{found:.{digits}g}", f"{allowed:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def plain(value: Any) -> Any:
    """Return `yes` and `no` for truth values, anything else unchanged."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def grid(
    rows: Sequence[Mapping[str, Any]], shown: Sequence[str], form: str = "simple", right: Collection[str] = ()
) -> str:
    """Return the columns `shown` of all rows, numbers and `right` aligned right; `form` is one of tabulate's."""
    from tabulate import tabulate

    numbers = [name in right or all(_is_number(row[name]) for row in rows) for name in shown]
    return tabulate(
        [[row[name] for name in shown] for row in rows],
        headers=[name.replace("_", "\n") if form == "simple" else " ".join(name.split()) for name in shown],
        tablefmt=form,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numbers] if rows else None,
    )


# The number of rows that a notebook shows.
FIRST_ROWS = 10


def html_table(title: str, rows: Sequence[Mapping[str, Any]], *, total: int) -> str:
    """Return a title, a table of the first of `total` rows and how many follow, as HTML for a notebook's cell."""
    numbers = [name for name in (rows[0] if rows else ()) if all(_is_number(row[name]) for row in rows)]
    values = {"title": title, "rows": rows, "numbers": numbers, "left_out": total - len(rows)}
    return template("attn_exp.core", "table.html.jinja").render(values)


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
    widths = [max((len(line) for line in name.replace("_", "\n").split("\n")), default=0) + 2 for name in shown]
    for index, name in enumerate(shown):
        widths[index] = max(widths[index], max((len(_text(row[name])) for row in rows), default=0))
    return sum(widths) + 2 * (len(shown) - 1)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _is_number(value: Any) -> bool:
    text = _text(value).lstrip(">+-")
    return not text or text.replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1).isdigit()


def terminal_width(stream: TextIO) -> int:
    """Return how wide tables on a stream are: as its terminal, as `COLUMNS` says, else `WIDTH`; at least 40."""
    own = int(os.environ.get("COLUMNS", "0")) if os.environ.get("COLUMNS", "").isdigit() else 0
    return max(40, own or terminal_columns(stream) or WIDTH)


def terminal_columns(stream: TextIO) -> int:
    """Return the columns of a stream's terminal, 0 if it is none."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns
    return 0


def at_width(text: str, stream: TextIO) -> str:
    """Return lines as wide as a stream's terminal is: it would break them within a number."""
    columns = terminal_columns(stream)
    return "\n".join(filled(line, columns) if len(line) > columns > 0 else line for line in text.split("\n"))


def colours(stream: TextIO) -> bool:
    """Return whether text on a stream may have colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def filled(line: str, width: int = WIDTH) -> str:
    """Return a sentence in lines of `width` columns, the following ones indented; no word is broken, at no hyphen.

    A line that is a command stays one, so that it can be copied.
    """
    if re.match(r"\s*(python -m|attn-exp) ", line):
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def and_text(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# Not brackets that no address can follow, as those of an interval, nor underscores, which mean nothing within a word.
_MARKED_UP = re.compile(r"([\\`*|]|\](?=[(\[:])|~(?=~))")


def markdown_text(text: str) -> str:
    """Return text, on one line, that Markdown shows literally: no link, image, tag or emphasis."""
    return _MARKED_UP.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))


def printable(text: str) -> str:
    """Return text on one line without control characters: names and reasons may contain anything."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(letter for letter in line if letter.isprintable())
