"""Text that all tables share: figures, labels and lines."""

import contextlib
import json
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO


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
    for label, chosen in zip(labels, options, strict=True):
        sets.setdefault(label, {}).setdefault(json.dumps(chosen, sort_keys=True), chosen)
    varied = {label: _differing(list(distinct.values())) for label, distinct in sets.items() if len(distinct) > 1}
    return [
        f"{label}({_typed(chosen, varied[label])})" if label in varied else label
        for label, chosen in zip(labels, options, strict=True)
    ]


def _typed(options: Mapping[str, Any], names: Sequence[str]) -> str:
    return ",".join(f"{name}={word(options.get(name))}" for name in names)


def _differing(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for options in sets for name in options})
    return [name for name in names if len({json.dumps(options.get(name)) for options in sets}) > 1]


WIDTH = 120
SHORT = {"forward": "fwd", "backward": "bwd", "step": "step"}


# Two digits of a value with a wider interval are known; one above the second was not measured well enough.
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


def uncontrolled(text: str) -> str:
    """Return a command without control characters, and with all of its spaces: they may be those of a path."""
    return "".join(filter(str.isprintable, text))


def printable(text: str) -> str:
    """Return text on one line without control characters: names and reasons may contain anything."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(letter for letter in line if letter.isprintable())
