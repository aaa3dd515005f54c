"""Carry out a choice: read the sweeps, filter their cells, and make the requested kind of comparison."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_exp.comparison import MARGIN
from attn_exp.comparison.changes import VERDICTS, Changes, compare_sweeps
from attn_exp.comparison.choice import Choice, check_ways
from attn_exp.comparison.comparison import Comparison
from attn_exp.comparison.history import History, compare_history
from attn_exp.comparison.ratio import Spreads
from attn_exp.comparison.rivals import Rivals, compare_rivals
from attn_exp.comparison.settled import Settlements
from attn_exp.core.errors import UserError
from attn_exp.core.stats.paired import MARGIN_FLOOR
from attn_exp.results.baselines import runs_of
from attn_exp.results.calibration import device_key, margin_for
from attn_exp.results.cell import Cell, cells_of, metric_of
from attn_exp.results.fields import distinct, fields, getter, kept_by, sortable
from attn_exp.results.read import Sweep, read_folder, sweep_folders
from attn_exp.results.result import Result, by_options, by_source
from attn_exp.results.there import sweeps_in

# The word for the last sweep that shares a case.
LAST = "last"
# Values of a row that are not fields of its cell.
_OWN: dict[type, dict[str, Callable[[Any], Any]]] = {
    Rivals: {"gain": lambda row: row.gain.value if row.gain else None},
    Changes: {"verdict": lambda row: VERDICTS.index(row.verdict), "change": lambda row: row.change},
    History: {"change": lambda row: row.change, "scatter": lambda row: row.scatter},
}


def sorted_rows(comparison: Comparison, word: str) -> Comparison:
    """Return the comparison with rows sorted by a field, or in descending order by `-field`; None comes last.

    Raises UserError if there is no such field.
    """
    name, down = word.removeprefix("-"), word.startswith("-")
    own = _OWN[type(comparison)]
    rows = comparison.rows
    if name in own:
        get = own[name]
    else:
        of_cell = getter(name, fields([row.cell for row in rows]) | dict.fromkeys(own, lambda cell: None), "sort=")

        def get(row: Any) -> Any:
            return of_cell(row.cell)

    present = [row for row in rows if get(row) is not None]
    missing = [row for row in rows if get(row) is None]
    return replace(comparison, rows=(*sorted(present, key=lambda row: sortable(get(row)), reverse=down), *missing))


def compare_read(choice: Choice, sweeps: Sequence[Sweep], against: Sequence[Sweep] = ()) -> Comparison:
    """Return the comparison that a choice requests, of sweeps that are already read.

    Raises UserError if the choice cannot be carried out; the message says what to type.
    """
    check_ways(choice, against=bool(against or choice.against))
    against = [run for sweep in against for run in runs_of(sweep)]
    both = sorted({(sweep.place, sweep.name) for sweep in sweeps} & {(sweep.place, sweep.name) for sweep in against})
    if both:
        raise UserError(f"{both[0][1]} is on both sides of against=: compare it with another sweep")
    together = labelled([*against, *sweeps], pairs=bool(against) or choice.history)
    results = results_of(together)
    if not results:
        see = next((sentence for sweep in together for sentence in sweep.broken), "its folder")
        raise UserError(f"{', '.join(sweep.name for sweep in together)} has no record that can be read: see {see}")
    metric = metric_of(choice.metric, results)
    spreads = spreads_for(results, choice.spread)
    notes = _basis(spreads, results)
    pairs = bool(against) and not choice.history
    cells = [cells_of(sweep.results, metric, turns=choice.spread is None) for sweep in together]
    chosen_cells = _filtered(cells, choice.where, pairs=pairs)
    old, new = together[: len(against)], together[len(against) :]
    cells_old = [cell for cells in chosen_cells[: len(against)] for cell in cells]
    cells_new = [cell for cells in chosen_cells[len(against) :] for cell in cells]
    if choice.history:
        comparison: Comparison = compare_history(new, chosen_cells, metric, spreads, anyway=choice.anyway)
    elif against:
        margin = choice.margin or choice.fail_if_slower or MARGIN
        comparison = compare_sweeps(
            old, new, cells_old, cells_new, metric, spreads, margin=margin, anyway=choice.anyway, notes=notes
        )
    else:
        comparison = compare_rivals(
            new,
            cells_new,
            metric,
            spreads,
            baseline=choice.baseline,
            by=choice.by,
            show=choice.show,
            notes=notes,
            duels_of=lambda: Settlements(homes(new)),
        )
    return sorted_rows(comparison, choice.sort) if choice.sort else comparison


def read_sweeps(choice: Choice, words: Sequence[str]) -> list[Sweep]:
    """Return the sweeps and baselines with these names, from folders or from MLflow.

    Raises UserError if there is no such sweep, or it has no records.
    """
    if choice.uri is not None and words:
        from attn_exp.tracking.mlflow_read import read_store

        return read_store(choice.uri, choice.mlflow_experiment, words)
    return [read_folder(folder) for folder in sweep_folders(words, choice.folder, baselines=True)]


def read_against(choice: Choice, sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Return the earlier sweeps or baselines to compare with; `last` is the last one that shares a case.

    Raises UserError if there is no such sweep, or it has no records.
    """
    home = choice.folder
    if choice.against != (LAST,) or choice.uri is not None or (home / LAST).exists():
        return read_sweeps(choice, choice.against)
    ordered = [str(folder) for folder in sweeps_in(home)]
    before = ordered[: min((ordered.index(sweep.place) for sweep in sweeps if sweep.place in ordered), default=0)]
    for folder in reversed(before):
        earlier = read_folder(Path(folder), may_be_empty=True)
        if {result.key for result in earlier.results} & {result.key for result in results_of(sweeps)}:
            return [earlier]
    raise UserError(f"against={LAST}: no earlier sweep in {home} shares a case and backend: name one")


def chosen(cells: Sequence[Cell], expression: str) -> list[Cell]:
    """Return the cells for which the expression holds.

    Raises UserError if the expression is invalid, names an unknown field, or holds for no cell.
    """
    return kept_by(expression, cells, fields(cells))


def labelled(sweeps: Sequence[Sweep], *, pairs: bool = False) -> list[Sweep]:
    """Return the sweeps with unique names, and their results with unique labels.

    With `pairs` a backend keeps its name if its source differs between sweeps only: its states are compared then, and
    the difference is reported like one of the environments.
    """
    each = [sweep.results for sweep in sweeps] if pairs else [results_of(sweeps)]
    renamed = iter(by_options([result for results in each for result in by_source(results)]))
    counts = Counter(sweep.name for sweep in sweeps)
    labelled = []
    for sweep in sweeps:
        name = sweep.name if counts[sweep.name] == 1 else sweep.place
        results = [next(renamed) for _ in sweep.results]
        # Rows of two sweeps belong to two sessions: the name distinguishes them even if a folder was renamed.
        labelled.append(
            replace(
                sweep,
                name=name,
                results=tuple(one if one.sweep == name else replace(one, sweep=name) for one in results),
            )
        )
    return labelled


def results_of(sweeps: Iterable[Sweep]) -> list[Result]:
    """Return the results of all sweeps."""
    return [result for sweep in sweeps for result in sweep.results]


def spreads_for(results: Sequence[Result], fixed: float | None) -> Spreads:
    """Return the spreads of the results' devices, from the margins that the doctor measured on this machine."""
    environments = {id(result.environment): result.environment for result in results}.values()
    devices = {device_key(dict(environment)) for environment in environments}
    return Spreads({device: margin_for(device) for device in sorted(devices)}, fixed, results)


def _filtered(cells: Sequence[list[Cell]], where: str | None, *, pairs: bool) -> list[list[Cell]]:
    """Return the cells of each sweep that `where=` selects, or all cells.

    With `pairs` a cell is also selected if its counterpart in another sweep is, so that new failures are not dropped.
    """
    every = [cell for own in cells for cell in own]
    if not every:
        raise UserError("there is nothing to compare: no record asked for that pass")
    if not where:
        return list(cells)
    selected = chosen(every, where)
    kept = {id(cell) for cell in selected}
    jobs = {(cell.result.key, cell.direction) for cell in selected} if pairs else set()
    return [[cell for cell in own if id(cell) in kept or (cell.result.key, cell.direction) in jobs] for own in cells]


def _basis(spreads: Spreads, results: Sequence[Result]) -> list[str]:
    """Return the note that says what the intervals consist of."""
    if spreads.fixed is not None:
        return [f"equal rows are assumed to differ by up to {100 * spreads.fixed:g} % (spread=)"]
    return [
        "95 % intervals: both rows' across rounds (+-%), and the usual difference of equal rows "
        f"({100 * min(map(spreads.margin, results), default=MARGIN_FLOOR):.1f} % and more)"
    ]


def homes(sweeps: Sequence[Sweep]) -> list[Path]:
    """Return the folders that sweeps lie in, where their duels are, too; none of sweeps from MLflow."""
    return distinct(path.parent for path in (Path(sweep.place).resolve() for sweep in sweeps) if path.is_dir())
