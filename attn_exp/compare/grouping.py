"""Grouping: which cells are rivals of each other, and which of one job's several measurements counts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from attn_exp.compare.cell import Cell
from attn_exp.compare.comparison import case_order
from attn_exp.compare.result import Result


def latest(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """The cells without those of a job that was measured again, in this or another sweep; and a sentence if any."""
    jobs: dict[Any, dict[Any, Cell]] = defaultdict(dict)
    for cell in cells:
        machines = jobs[cell.result.key, cell.direction, way(cell.result)]
        on = machine(cell.result)
        if on not in machines or machines[on].result.finished_at <= cell.result.finished_at:
            machines[on] = cell
    for machines in jobs.values():
        # A try that got nowhere knows no machine: it counts if it is the last, and gives way to any later one.
        failed = machines.get(None)
        others = [cell for on, cell in machines.items() if on is not None]
        if failed is not None and others:
            later = all(cell.result.finished_at <= failed.result.finished_at for cell in others)
            if later and len(others) == 1:
                machines.clear()
                machines[None] = failed
            else:
                del machines[None]
    kept = [cell for machines in jobs.values() for cell in machines.values()]
    gone = len(cells) - len(kept)
    return kept, [f"{gone} cells were measured again later: the last counts"] if gone else []


def rivals_of(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that may be compared: one case and pass, measured in one way on one kind of machine."""
    rough: dict[Any, list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=case_order):
        rough[cell.result.case, cell.direction, way(cell.result)].append(cell)
    groups = []
    for together in rough.values():
        machines: dict[Any, list[Cell]] = defaultdict(list)
        for cell in together:
            machines[machine(cell.result)].append(cell)
        # A job that got nowhere knows no machine: it stands with the first.
        nowhere = machines.pop(None, [])
        first, *others = machines.values() or [[]]
        groups += [sorted(first + nowhere, key=case_order), *others]
    return groups


def way(result: Result) -> tuple[Any, ...]:
    """How a result was measured, as far as unlike ways cannot be compared."""
    return result.device, result.measuring.timer, result.measuring.regime, result.measuring.l2


def machine(result: Result) -> tuple[Any, ...] | None:
    """What a result was measured on, and by which method; None if it got nowhere."""
    if result.status != "ok":
        return None
    return (result.device_name, result.environment.get("power_limit_w"), result.l2, result.method_version)
