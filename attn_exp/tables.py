"""Tables: the figures and grids that all tables share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 120
SHORT = {"forward": "fwd", "backward": "bwd"}


def figures(value: float) -> str:
    """Four significant digits, and never an exponent."""
    if value >= 1000:
        return f"{value:.0f}"
    digits = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(digits, 6)}f}"


def plain(value: Any) -> Any:
    """`yes` and `no` for truth values, all else as it is."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def grid(rows: Sequence[Mapping[str, Any]], shown: Sequence[str], form: str = "simple") -> str:
    """The columns `shown` of all rows, numbers to the right; `form` is a format of tabulate's."""
    from tabulate import tabulate

    numbers = [all(_is_number(row[name]) for row in rows) for name in shown]
    return tabulate(
        [[row[name] for name in shown] for row in rows],
        headers=[name.replace("_", "\n") if form == "simple" else " ".join(name.split()) for name in shown],
        tablefmt=form,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numbers] if rows else None,
    )


def fitted(
    rows: Sequence[Mapping[str, Any]], shown: Sequence[str], dispensable: Sequence[str], width: int
) -> tuple[str, list[str]]:
    """The grid in `width` columns, and the names that it had to leave out; the first of `dispensable` goes first."""
    kept, left_out = list(shown), []
    waiting = [name for name in dispensable if name in kept]
    while waiting and len(kept) > 1 and _width(rows, kept) > width:
        left_out.append(waiting.pop(0))
        kept.remove(left_out[-1])
    return grid(rows, kept), left_out


def _width(rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> int:
    """How wide tabulate's `simple` form will be: a header has two spaces of its own, and two stand between columns."""
    widths = [max((len(line) for line in name.replace("_", "\n").split("\n")), default=0) + 2 for name in shown]
    for index, name in enumerate(shown):
        widths[index] = max(widths[index], max((len(_text(row[name])) for row in rows), default=0))
    return sum(widths) + 2 * (len(shown) - 1)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _is_number(value: Any) -> bool:
    text = _text(value).lstrip(">+-")
    return not text or text.replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1).isdigit()
