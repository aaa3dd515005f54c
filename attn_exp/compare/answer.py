"""Answer: from a choice to a comparison. Reads, filters, and hands over to the kind of comparison asked for."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attn_exp.calibration import delta_for, device_key
from attn_exp.compare.cell import Cell, cells_of, metric_of
from attn_exp.compare.choice import Choice
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.fields import fields, getter
from attn_exp.compare.ratio import Spreads
from attn_exp.compare.read import Sweep, read_folder, sweep_folders
from attn_exp.compare.result import Result, named
from attn_exp.compare.rivals import compare_rivals
from attn_exp.compare.where import chosen
from attn_exp.errors import UserError
from attn_exp.verdict import DELTA_FLOOR


def answer(choice: Choice) -> Comparison:
    """The comparison that a choice asks for.

    Raises:
        UserError: something to type differently.
    """
    sweeps = labelled(read_sweeps(choice, choice.sweep))
    metric = metric_of(choice.metric, results_of(sweeps))
    cells = filtered(cells_of(results_of(sweeps), metric), choice.where)
    spreads = spreads_for(results_of(sweeps), choice.spread)
    return compare_rivals(
        sweeps, cells, metric, spreads, baseline=choice.baseline, by=choice.by, notes=calibration_notes(spreads)
    )


def read_sweeps(choice: Choice, words: Sequence[str]) -> list[Sweep]:
    """The sweeps that words name, from folders or from MLflow.

    Raises:
        UserError: there is no such sweep, or nothing in it.
    """
    return [read_folder(folder) for folder in sweep_folders(words, Path(choice.folder))]


def labelled(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """The sweeps with labels that are unique over all of them."""
    found = iter(named(results_of(sweeps)))
    return [replace(sweep, results=tuple(next(found) for _ in sweep.results)) for sweep in sweeps]


def results_of(sweeps: Iterable[Sweep]) -> list[Result]:
    """The results of all sweeps."""
    return [result for sweep in sweeps for result in sweep.results]


def filtered(cells: list[Cell], where: str | None) -> list[Cell]:
    """The cells that `where=` chooses, all without it. Raises UserError if there are none."""
    if not cells:
        raise UserError("there is no cell to compare: none of the records asked for that pass")
    return chosen(cells, where) if where else cells


def spreads_for(results: Iterable[Result], fixed: float | None) -> Spreads:
    """The spreads of the devices that results come from, as the doctor found them on this machine."""
    devices = {device_key(environment) for environment in {id(r.environment): r.environment for r in results}.values()}
    return Spreads({device: delta_for(device) for device in sorted(devices)}, fixed)


def calibration_notes(spreads: Spreads) -> list[str]:
    """What the intervals rest on."""
    if spreads.fixed is not None:
        return [f"rows are taken to differ by up to {100 * spreads.fixed:.1f} % though equal (spread=)"]
    largest = max(spreads.deltas.values(), default=DELTA_FLOOR)
    return [
        "intervals: both rows' own over rounds, and what rows measured at different moments differ by "
        f"({100 * largest:.1f} %, more under a power cap): less is no difference"
    ]


def sort_rows(rows: Sequence[Cell], name: str) -> list[Cell]:
    """Cells by one field, the missing last; `-name` from the largest down. Raises UserError for an unknown field."""
    get = getter(name.lstrip("-"), fields(rows), "sort=")
    present = [cell for cell in rows if get(cell) is not None]
    missing = [cell for cell in rows if get(cell) is None]
    return sorted(present, key=get, reverse=name.startswith("-")) + missing
