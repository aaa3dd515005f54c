"""Draw the trends of one case and pass as SVG: values with their intervals, changes of level, environment changes.

Not by matplotlib, which takes a tenth of a second for each of a hundred charts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.comparison import SweepSummary
from attn_exp.compare.history import History, Trend
from attn_exp.compare.page_parts import day
from attn_exp.compare.sheet import Picture, written
from attn_exp.core.catalogue import colour_of, recorded_about
from attn_exp.core.request import backend_label
from attn_exp.core.text import figures, template

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1080, 330, 70, 800, 48, 292
# The widest range of values that is drawn on a linear scale.
_LINEAR = 3.0
_TICKS, _DATES, _LEGEND = 5, 8, 14
_GOOD, _BAD = "#00674b", "#b3261e"
# What of an environment may move a level; whatever else differs stands in the table of environments.
_NAMES = frozenset({"gpu", "gpu_uuid", "driver", "cuda", "cpu", "cpu_threads", "power_limit_w", "host"})


@dataclass(frozen=True)
class EnvironmentChange:
    """What changed in the environment from the sweep before the one with index `at` to that one."""

    at: int
    said: tuple[str, ...]


def environment_changes(sweeps: Sequence[SweepSummary]) -> list[EnvironmentChange]:
    """Return where GPU, driver, host or the version of a package differ from what they were in earlier sweeps."""
    known: dict[str, str] = {}
    changes = []
    for at, sweep in enumerate(sweeps):
        here = {name: value for name, value in sweep.environment if name in _NAMES or name.startswith("versions.")}
        said = tuple(
            f"{name} {known[name]} -> {here[name]}" for name in here if known.get(name, here[name]) != here[name]
        )
        if said:
            changes.append(EnvironmentChange(at, said))
        known |= here
    return changes


def trend_chart(history: History, rows: Sequence[Trend], changes: Sequence[EnvironmentChange]) -> Picture:
    """Return the chart of the trends of one case and pass; `rows` are those of `history` that it shows."""
    names = [one.name for one in history.sweeps]
    scale = _scale_of(rows)

    def x(at: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (at + 0.5) / len(names), 1)

    numbered = [
        {"x": x(one.at - 0.5), "number": number, "said": f"{names[one.at]}: {'; '.join(one.said)}"}
        for number, one in enumerate(changes, 1)
    ]
    curves = [_curve(history, row, x, scale) for row in rows]
    svg = template("attn_exp.compare", "trend.svg.jinja").render(
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        y_title=history.metric.kind.head,
        y_ticks=[(scale.y(value), figures(value)) for value in scale.ticks()],
        x_ticks=[(x(at), text) for at, text in _dates(history.sweeps)],
        changes=numbered,
        curves=curves,
        legend=[one | {"y": _TOP + 12 + 18 * at} for at, one in enumerate(_legend(curves))],
    )
    cell = rows[0].cell
    caption = f"each record's 95 % interval; {_marked(rows)}"
    if numbered:
        caption += f"; dashed lines: {', '.join('{number} {said}'.format(**one) for one in numbered)}"
    model = f"{cell.result.model} " if cell.result.model else ""
    return Picture(f"{model}{cell.result.case.label()} {cell.direction}", caption, svg)


def _legend(curves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the legend; of many, how many more there are, which tell their names by the pointer."""
    more = len(curves) - _LEGEND
    if more <= 0:
        return list(curves)
    return [*curves[:_LEGEND], {"name": f"and {more} more", "colour": "none", "dashed": False}]


def _marked(rows: Sequence[Trend]) -> str:
    count = sum(len(row.turns) for row in rows)
    return f"{count} changes of level" if count != 1 else "1 change of level"


@dataclass(frozen=True)
class _Scale:
    """Values from `low` to `high` on the vertical axis."""

    low: float
    high: float
    is_log: bool

    def y(self, value: float) -> float:
        at, low, high = (math.log(one) if self.is_log else one for one in (value, self.low, self.high))
        return round(_BOTTOM - (_BOTTOM - _TOP) * (at - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        """Return round numbers within."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        else:
            raw = (self.high - self.low) / _TICKS
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw)
            ticks = [step * at for at in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def _scale_of(rows: Sequence[Trend]) -> _Scale:
    bounds = [bound for row in rows for _, low, _, high in _values(row) for bound in (low, high)]
    low, high = min(bounds), max(bounds)
    # Equal values, and room for the marks.
    room = 1.02 * (high / low) ** 0.08
    return _Scale(low / room, high * room, high / low > _LINEAR)


def _values(row: Trend) -> Iterator[tuple[int, float, float, float]]:
    """Yield index, lower bound, value and upper bound of each value, corrected for sessions."""
    first = next(cell.value for cell in row.cells if cell is not None and cell.value)
    for at, (cell, relative) in enumerate(zip(row.cells, row.relative, strict=True)):
        if cell is not None and relative is not None:
            half = min(cell.half or 0.0, 1.0)
            yield at, first * relative * math.exp(-half), first * relative, first * relative * math.exp(half)


def _curve(history: History, row: Trend, x: Any, scale: _Scale) -> dict[str, Any]:
    result = row.cell.result
    names = [one.name for one in history.sweeps]
    device = result.device_name
    own = str(result.backend["name"])
    about = recorded_about(own, None)
    points = [
        {
            "x": x(at),
            "y": scale.y(value),
            "low": scale.y(low),
            "high": scale.y(high),
            "said": f"{names[at]} {day(history.sweeps[at].ended_at)}: {result.label} {figures(value)}"
            f" [{figures(low)}, {figures(high)}] {history.metric.name}, {device}",
        }
        for at, low, value, high in _values(row)
    ]
    at_x = {one["x"]: one for one in points}
    turns = [_turn(history, row, index, at_x[x(turn.at)], names) for index, turn in enumerate(row.turns)]
    several = len({other for one in history.sweeps for other in one.devices}) > 1
    return {
        "name": f"{result.label}, {device}" if several and device else result.label,
        "colour": colour_of(own, about),
        "dashed": backend_label(own, result.compile) != own,
        "lines": [" ".join(f"{one['x']},{one['y']}" for one in points)],
        "points": points,
        "turns": turns,
    }


def _turn(history: History, row: Trend, index: int, point: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    turn = row.turns[index]
    text = f"{written(turn.change, 'percent')} %"
    around = "; ".join(map(str, turn.coincides)) or "no difference between the environments is recorded"
    better = (turn.change > 0) == history.metric.kind.higher_is_better
    # Above the value, and pointing to it.
    y = point["high"] - 6
    return {
        "x": point["x"],
        "y": y,
        "tail": -10,
        "text_y": y - 14,
        "text": text,
        "colour": _GOOD if better else _BAD,
        "said": f"{row.cell.result.label} {text} from {names[turn.at]} on (p = {turn.p:.2g}): {around}",
    }


def _dates(sweeps: Sequence[SweepSummary]) -> list[tuple[int, str]]:
    """Return the dates below some of the sweeps; times, where all are of one day."""
    every = max(1, math.ceil(len(sweeps) / _DATES))
    texts = [day(one.ended_at) for one in sweeps]
    part = slice(11, 16) if len({text[:10] for text in texts}) == 1 and len(sweeps) > 1 else slice(10)
    return [(at, texts[at][part]) for at in range(0, len(sweeps), every)]
