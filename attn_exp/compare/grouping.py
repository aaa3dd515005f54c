"""Grouping: which cells are rivals of each other, and which of one job's several measurements counts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from attn_exp.compare.cell import Cell
from attn_exp.compare.comparison import case_order
from attn_exp.compare.result import Result


def latest(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """The cells without those of a job that was measured again, in this or another sweep; and a sentence if any."""
    kept: dict[Any, Cell] = {}
    for cell in cells:
        key = (cell.result.key, cell.direction, _way(cell.result), _machine(cell.result))
        if key not in kept or kept[key].result.finished_at <= cell.result.finished_at:
            kept[key] = cell
    gone = len(cells) - len(kept)
    return list(kept.values()), [f"{gone} cells were measured again later: the last counts"] if gone else []


def rivals_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that may be compared: one case and pass, measured in one way on one kind of machine."""
    rough: dict[Any, list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=case_order):
        rough[cell.result.case, cell.direction, _way(cell.result)].append(cell)
    groups = []
    for together in rough.values():
        machines: dict[Any, list[Cell]] = defaultdict(list)
        for cell in together:
            machines[_machine(cell.result)].append(cell)
        # A job that got nowhere knows no machine: it stands with the first.
        nowhere = machines.pop(None, [])
        first, *others = machines.values() or [[]]
        groups += [sorted(first + nowhere, key=case_order), *others]
    return groups


def _way(result: Result) -> tuple[Any, ...]:
    return result.device, result.measuring.timer, result.measuring.regime


def _machine(result: Result) -> tuple[Any, ...] | None:
    if result.status != "ok":
        return None
    return (result.device_name, result.environment.get("power_limit_w"), result.l2, result.method_version)
