"""Match cells that measure the same thing: within one sweep, and between two."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from attn_exp.comparison.comparison import case_order
from attn_exp.core.case.fields import case_columns
from attn_exp.core.source import short
from attn_exp.results.cell import Cell
from attn_exp.results.fields import OF_MEASURING, distinct
from attn_exp.results.result import Result


def latest(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """Return the cells without superseded ones, of jobs that were measured again, and a note if there were any."""
    jobs: dict[Any, dict[Any, Cell]] = defaultdict(dict)
    for cell in cells:
        machines = jobs[cell.result.key, short(cell.result.source), cell.direction, method_key(cell.result)]
        on = machine(cell.result)
        if on not in machines or machines[on].result.finished_at <= cell.result.finished_at:
            machines[on] = cell
    for machines in jobs.values():
        # A failed attempt has no machine: it counts if it is the latest, and any later cell replaces it.
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
    return kept, [f"{gone} cells were measured again later: the latest counts"] if gone else []


def comparable_groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells that may be compared: one case and pass, measured in the same way on the same kind of machine."""
    rough: dict[Any, list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=case_order):
        rough[cell.result.case, cell.direction, method_key(cell.result)].append(cell)
    groups = []
    for together in rough.values():
        machines: dict[Any, list[Cell]] = defaultdict(list)
        for cell in together:
            machines[machine(cell.result)].append(cell)
        # A failed job has no machine: it is listed in the first group.
        nowhere = machines.pop(None, [])
        first, *others = machines.values() or [[]]
        groups += [sorted(first + nowhere, key=case_order) if nowhere else first, *others]
    return groups


# Properties besides the case in which rows of one sweep may differ, by their names in `by=`. Such rows stay apart.
WAYS: dict[str, Callable[[Result], str]] = {
    "gpu": lambda result: result.device_name,
    "device": lambda result: result.device,
    **{name: attrgetter(f"measuring.{name}") for name in OF_MEASURING},
    "accumulate": lambda result: "true" if result.measuring.accumulate else "false",
    "power_limit_w": lambda result: str(result.environment.get("power_limit_w")),
    "method_version": lambda result: result.method_version,
}


_of_measuring = attrgetter(*(f"measuring.{name}" for name in OF_MEASURING))


def method_key(result: Result) -> tuple[Any, ...]:
    """Return how a result was measured, as far as different ways are not comparable."""
    return result.device, *_of_measuring(result)


def machine(result: Result) -> tuple[Any, ...] | None:
    """Return the machine and the method of a result; None if the job failed."""
    if result.status != "ok":
        return None
    return (result.device_name, result.environment.get("power_limit_w"), result.l2, result.method_version)


def case_of(cell: Cell) -> tuple[Any, ...]:
    """Return what identifies the case of a cell, whose passes are several groups."""
    result = cell.result
    return result.case, method_key(result), machine(result)


def run_key(cell: Cell) -> tuple[Any, ...]:
    """Return what the runs of a cell in several sweeps share; its source may have changed between them."""
    threads = cell.result.device == "cpu" and cell.result.environment.get("cpu_threads")
    return cell.result.key, cell.result.label, cell.direction, *case_of(cell), threads


Pair = tuple[Cell | None, Cell | None]
_SHOWN = 4
# The properties that counterparts share, the most first, and whether it is enough where a cell has several.
_SAME: tuple[tuple[Callable[[Result], Any], bool], ...] = (
    (lambda result: (result.measuring, machine(result), short(result.source)), True),
    (lambda result: (result.measuring, machine(result)), True),
    (lambda result: result.measuring, True),
    (method_key, True),
    (lambda result: None, False),
)


def joined(old: Sequence[Cell], new: Sequence[Cell]) -> list[Pair]:
    """Pair every cell of both sides with its counterpart, if there is one: the latest of several runs.

    Counterparts have the same case, backend with options, device and pass. Cells with the same measuring options on the
    same kind of machine are paired first, and among them those of the same source. Cells with the same timer follow,
    then all that remain unambiguous. The comparison of environments decides afterwards whether a pair may be compared.
    """
    waiting: dict[Any, list[Cell]] = defaultdict(list)
    for cell in sorted(latest(old)[0], key=lambda cell: cell.result.finished_at, reverse=True):
        waiting[cell.result.key, cell.direction].append(cell)
    fresh = latest(new)[0]
    counterpart: dict[int, Cell] = {}
    for same, sure in _SAME:
        for cell in fresh:
            if id(cell) not in counterpart:
                there = waiting.get((cell.result.key, cell.direction), ())
                match = next((other for other in there if same(other.result) == same(cell.result)), None)
                if match is not None and (sure or len(there) == 1):
                    counterpart[id(cell)] = match
                    waiting[cell.result.key, cell.direction].remove(match)
    pairs: list[Pair] = [(counterpart.get(id(cell)), cell) for cell in fresh]
    known = {run_key(cell) for cell in counterpart.values()}
    return pairs + [(cell, None) for cells in waiting.values() for cell in cells if run_key(cell) not in known]


def nothing_in_common(old: Sequence[Cell], new: Sequence[Cell]) -> str:
    """Return why two sides have no cell in common: the first property in which they share no value."""
    things = {"device": "result.device", "pass": "direction", "backend": "result.label"}
    things |= {name: f"result.case.{name}" for name in case_columns()}
    for name, of_cell in things.items():
        before, after = (distinct(map(attrgetter(of_cell), side)) for side in (old, new))
        if not set(before) & set(after):
            return f"{name} is {_some(before)} in the old and {_some(after)} in the new"
    return "they share backends and cases, but no backend was measured on a case in both"


def _some(values: Sequence[Any]) -> str:
    text = ", ".join(str(value) for value in values[:_SHOWN])
    return text + (" ..." if len(values) > _SHOWN else "")
