"""Judge a sweep that was measured again, row by row: confirmed or not, and how the two hosts differ."""

import math
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attn_exp.comparison.comparison import case_order
from attn_exp.comparison.environment import facts
from attn_exp.comparison.join import joined
from attn_exp.comparison.ratio import gain
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.sheet import Column, Headline, Page, Sheet, split
from attn_exp.core.stats.interval import combined
from attn_exp.reproduce.judged import CONTRADICTED, REPRODUCED
from attn_exp.results.cell import Cell, ChosenMetric, cells_of
from attn_exp.results.duel_command import foreign_classes
from attn_exp.results.read import read_folder
from attn_exp.results.result import Result

# Rows that differ by less are the same for whoever chooses a backend.
_EQUAL = math.log1p(0.01)
# What a host has, and what a pass had there, with the difference that is worth a word.
_OF_HOSTS = ("power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz", "driver", "cuda", "cudnn")
_OF_PASSES = (("clock_mhz", 0.01, 1.0), ("launch_share", 0.0, 0.05))
_ARCHIVE = ".tar.xz"


def is_sweep(name: str) -> bool:
    """Whether a name is that of an archive or a folder of records, and not of a source of published figures."""
    return name.endswith(_ARCHIVE) or Path(name).is_dir()


@contextmanager
def records_of(name: str) -> Iterator[tuple[Result, ...]]:
    """Yield the results in a folder or in an archive of one. Raises UserError if there are none."""
    with TemporaryDirectory() as place:
        folder = Path(name)
        if name.endswith(_ARCHIVE):
            try:
                with tarfile.open(name) as archive:
                    archive.extractall(place, filter="data")
            except (OSError, tarfile.TarError, EOFError) as error:
                raise UserError(f"{name} cannot be read as an archive of records: {error}") from error
            inside = [path for path in Path(place).iterdir() if path.is_dir()]
            folder = inside[0] if len(inside) == 1 else Path(place)
        yield read_folder(folder).results


def sample(results: Sequence[Result], rows: int | None) -> list[Result]:
    """Return so many of the measured results, as far apart as they can be in the order of cases; None is all.

    Those of a class that is not this package's are left out: nobody's records may say what is imported here.
    """
    measured = [result for result in results if result.status == "ok" and not foreign_classes(result)]
    measured.sort(key=lambda result: (result.case.label(), result.label))
    count = len(measured) if rows is None else min(rows, len(measured))
    return [measured[index * len(measured) // count] for index in range(count)]


@dataclass(frozen=True)
class Confirmed:
    """A cell of a sweep with the one that was measured here.

    `ratio` is our rate over theirs with its 95 % interval `low` to `high`, of both; None if nothing was measured here.
    `differs` names what differs between the hosts, of a row that is not confirmed.
    """

    there: Cell
    here: Cell | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    differs: str


def confirm(there: Sequence[Result], here: Sequence[Result]) -> list[Confirmed]:
    """Return each pass that was measured there, with what was measured here."""
    metric = ChosenMetric()
    pairs = joined(cells_of(there, metric, turns=False), cells_of(here, metric, turns=False))
    rows = [_confirmed(old, new, metric) for old, new in pairs if old is not None and old.value is not None]
    return sorted(rows, key=lambda row: case_order(row.there))


def _confirmed(old: Cell, new: Cell | None, metric: ChosenMetric) -> Confirmed:
    log = gain(new, old, metric) if new is not None else None
    if new is None or log is None:
        why = "not measured" if new is None else f"{new.result.status} here"
        return Confirmed(old, new, None, None, None, why, (new.result.reason or "") if new else "")
    half = combined([old.uncertainty, new.uncertainty]).half
    low, ratio, high = (math.exp(log + step) for step in (-half, 0.0, half))
    if old.result.device_name != new.result.device_name:
        verdict = "another GPU: no verdict"
    elif not (old.compared and new.compared):
        verdict = "too uncertain"
    elif abs(log) <= max(_EQUAL, half if half <= REPRODUCED else 0.0):
        verdict = "confirmed"
    else:
        verdict = "contradicted" if abs(log) - half > CONTRADICTED else "beside"
    differs = "" if verdict == "confirmed" else "; ".join(_differing(old, new)) or "no difference is known"
    return Confirmed(old, new, ratio, low, high, verdict, differs)


def _differing(old: Cell, new: Cell) -> list[str]:
    """Return what differs between two cells: of the hosts, the libraries, the method, the clocks and the flags."""
    there, here = facts(old.result), facts(new.result)
    names = [*_OF_HOSTS, *(name for name in there if name.startswith("versions.") and name != "versions.attn_exp")]
    found = [
        f"{name.removeprefix('versions.')} {there[name]} there, {here[name]} here"
        for name in names
        if name in there and name in here and there[name] != here[name]
    ]
    methods = old.result.method_version, new.result.method_version
    found += [f"method {methods[0]} there, {methods[1]} here"] * (methods[0] != methods[1])
    for name, share, least in _OF_PASSES:
        was, now = (cell.result.metrics.get(f"{cell.direction}/{name}") for cell in (old, new))
        if was is not None and now is not None and abs(was - now) > max(share * was, least):
            found.append(f"{name} {was:.4g} there, {now:.4g} here")
    for where, cell in (("there", old), ("here", new)):
        found += [f"{', '.join(cell.flags)} {where}"] if cell.flags else []
    return found


def confirmed_page(rows: Sequence[Confirmed]) -> Page:
    """Return the page of a sweep's rows beside those that were measured again."""
    columns, values = split(
        (
            (Column("case", "case"), lambda row: row.there.result.case.label()),
            (Column("backend", "backend"), lambda row: row.there.result.label),
            (Column("pass", "pass"), lambda row: row.there.short),
            (Column("there_us", "there us", "figure"), lambda row: row.there.value),
            (Column("here_us", "here us", "figure"), lambda row: row.here.value if row.here else None),
            (Column("ratio", "ratio", "ratio"), lambda row: row.ratio),
            (Column("low", "", "ratio"), lambda row: row.low),
            (Column("high", "", "ratio"), lambda row: row.high),
            (Column("interval", "95 % interval", joined=_interval), None),
            (Column("verdict", "verdict"), lambda row: row.verdict),
            (Column("differs", ""), lambda row: row.differs),
        )
    )
    counts = Counter(row.verdict for row in rows)
    summary = f"of {len(rows)} rows {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
    near = sum(row.ratio is not None and abs(math.log(row.ratio)) <= REPRODUCED for row in rows)
    why: dict[str, list[str]] = {}
    for row in rows:
        if row.differs:
            why.setdefault(row.differs, []).append(f"{row.there.result.case.label()} {row.there.result.label}")
    notes = (
        "ratio: our rate over theirs; confirmed: within 1 %, or within both intervals if these are at most 3 %; "
        "contradicted: the whole interval beyond 10 %; beside: between these",
        f"{near} of {len(rows)} within 3 %",
        *(f"{where}: {_hosts([cell.result for cell in cells])}" for where, cells in _sides(rows) if cells),
        *(f"{text}: {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}" for text, names in why.items()),
    )
    about: dict[str, Any] = {"kind": "confirmed", "rows": len(rows), "within_3_percent": near, **counts}
    sheet = Sheet("rows", "", columns, tuple(map(values, rows)))
    return Page(about, (), (sheet,), notes, headline=Headline((summary,)))


def _interval(values: dict[str, Any]) -> str:
    return "" if values["low"] is None else f"{values['low']:.3f} to {values['high']:.3f}"


def _sides(rows: Sequence[Confirmed]) -> tuple[tuple[str, list[Cell]], ...]:
    return ("there", [row.there for row in rows]), ("here", [row.here for row in rows if row.here is not None])


def _hosts(results: Sequence[Result]) -> str:
    cards = {
        (result.device_name, str(result.environment.get("gpu_uuid") or "")) for result in results if result.device_name
    }
    return ", ".join(sorted(" ".join(filter(None, card)) for card in cards))
