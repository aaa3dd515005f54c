"""Judge a sweep that was measured again, pass by pass: confirmed or not, and how the two hosts differ."""

import lzma
import math
import random
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from attn_exp.comparison.columns import row_sheet
from attn_exp.comparison.comparison import case_order
from attn_exp.comparison.environment import REFUSED, differences
from attn_exp.comparison.join import joined, nothing_in_common
from attn_exp.comparison.ratio import gain
from attn_exp.core.errors import UserError, first_line
from attn_exp.core.sheet.sheet import Column, Headline, Page, Pairs
from attn_exp.core.stats.interval import combined
from attn_exp.reproduce.judged import CONTRADICTED, REPRODUCED
from attn_exp.reproduce.page import RATIO
from attn_exp.results.cell import Cell, ChosenMetric, cells_of
from attn_exp.results.read import Sweep, read_folder
from attn_exp.results.result import Result

# Rows that differ by less are the same for whoever chooses a backend.
_EQUAL = math.log1p(0.01)
# Facts that may explain another time; hosts differ in more.
_CAUSES = REFUSED | {"driver", "cuda", "cudnn", "max_sm_clock_mhz", "max_memory_clock_mhz", "gpu_uuid"}
# Measured conditions of a pass, with the difference that is worth a word, as a share and absolute.
_GIVEN = (("clock_mhz", 0.01, 1.0), ("launch_share", 0.0, 0.05))
# Ways to measure that give other numbers.
_WAYS = REFUSED - {"power_limit_w", "method_version"}


def is_sweep(name: str, home: Path) -> bool:
    """Whether a name is that of a sweep in `home`, of a folder or of an archive of records."""
    return Path(name).is_dir() or (home / name).is_dir() or bool({".tar", ".tgz"} & {*Path(name).suffixes})


@contextmanager
def records_of(name: str, home: Path = Path()) -> Iterator[Sweep]:
    """Yield a sweep of `home`, of a folder or of an archive. Raises UserError if it has no measured job."""
    with TemporaryDirectory() as place:
        folder = Path(name) if Path(name).is_dir() else home / name
        if not folder.is_dir():
            try:
                with tarfile.open(name) as archive:
                    archive.extractall(place, filter="data")
                    # The checksum is at the end; a damaged member looks as if it were the last.
                    while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                        pass
            except (OSError, tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
                reason = getattr(error, "strerror", None) or first_line(error).rstrip(":")
                raise UserError(f"{name} is no archive of records, or damaged: {reason}") from error
            inside = [path for path in Path(place).iterdir() if path.is_dir()]
            folder = inside[0] if len(inside) == 1 else Path(place)
        sweep = read_folder(folder, may_be_empty=True)
        if not any(result.status == "ok" for result in sweep.results):
            raise UserError(f"{name} has no measured job: give the folder or the archive of one sweep")
        yield sweep


def sample(results: Sequence[Result], rows: int | None) -> list[Result]:
    """Return so many of the measured results, the same ones each time; None is all."""
    measured = [result for result in results if result.status == "ok"]
    if rows is None or rows >= len(measured):
        return measured
    return random.Random(0).sample(measured, rows)


@dataclass(frozen=True)
class Confirmed:
    """A pass of a sweep with the one that was measured here.

    `ratio` is our rate over theirs with its 95 % interval `low` to `high`, of both; None if nothing was measured here.
    `differs` names what differs between the hosts, of a row that is not confirmed.
    """

    there: Cell
    here: Cell | None
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    differs: str = ""


def confirm(there: Sequence[Result], here: Sequence[Result]) -> list[Confirmed]:
    """Return each pass that was measured there, with what was measured here. Raises UserError if nothing was."""
    metric = ChosenMetric()
    theirs, ours = (cells_of(results, metric, turns=False) for results in (there, here))
    pairs = [(old, new) for old, new in joined(theirs, ours) if old is not None and old.value is not None]
    if all(new is None for _, new in pairs):
        raise UserError(f"none of these passes was measured here: {nothing_in_common(theirs, ours)}")
    rows = [_confirmed(old, new, metric) for old, new in pairs]
    return sorted(rows, key=lambda row: case_order(row.there))


def _confirmed(old: Cell, new: Cell | None, metric: ChosenMetric) -> Confirmed:
    if new is None:
        return Confirmed(old, None, "not measured")
    better = gain(new, old, metric)
    if better is None:
        return Confirmed(old, new, f"{new.result.status} here", differs=new.result.reason or "")
    half = combined([old.uncertainty, new.uncertainty]).half
    libraries = {"torch", "triton", *new.result.about.packages}
    causes = _CAUSES | {f"versions.{name}" for name in libraries}
    unlike = [one for one in differences([(old.result, new.result)]) if one.name in causes]
    if any(one.name in _WAYS for one in unlike):
        verdict = "measured differently"
    elif abs(better) - half > CONTRADICTED:
        verdict = "contradicted"
    elif half > REPRODUCED:
        verdict = "too uncertain"
    else:
        verdict = "confirmed" if abs(better) <= max(_EQUAL, half) else "beside"
    facts = ("another card" if one.name == "gpu_uuid" else str(one) for one in unlike)
    differs = [*facts, *_given(old, new)] or ["nothing differs that the records have"]
    low, ratio, high = (math.exp(better + step) for step in (-half, 0.0, half))
    return Confirmed(old, new, verdict, ratio, low, high, "" if verdict == "confirmed" else "; ".join(differs))


def _given(old: Cell, new: Cell) -> list[str]:
    """Return the conditions of a pass that differ between the hosts, and its marks."""
    found = []
    for name, share, least in _GIVEN:
        was, now = (cell.result.metrics.get(f"{cell.direction}/{name}") for cell in (old, new))
        if was is not None and now is not None and abs(was - now) > max(share * was, least):
            found.append(f"{name} {was:.4g} -> {now:.4g}")
    marks = [", ".join(cell.flags) or "no mark" for cell in (old, new)]
    if old.flags or new.flags:
        found.append(f"both {marks[0]}" if marks[0] == marks[1] else f"{marks[0]} -> {marks[1]}")
    return found


def confirmed_page(rows: Sequence[Confirmed], broken: Sequence[str] = ()) -> Page:
    """Return the page of a sweep's passes beside those that were measured again; the others are counted.

    `broken` are sentences about records that could not be read.
    """
    pairs: Pairs = (
        (Column("case", "case"), lambda row: row.there.result.case.label()),
        (Column("backend", "backend"), lambda row: row.there.result.label),
        (Column("pass", "pass"), lambda row: row.there.short),
        (Column("there_us", "there us", "figure"), lambda row: row.there.value),
        (Column("here_us", "here us", "figure"), lambda row: row.here.value if row.here else None),
        *RATIO,
        (Column("verdict", "verdict"), lambda row: row.verdict),
        (Column("differs", ""), lambda row: row.differs),
    )
    counts, every = Counter(row.verdict for row in rows), len(rows)
    rows = [row for row in rows if row.here is not None]
    near = sum(row.ratio is not None and abs(math.log(row.ratio)) <= REPRODUCED for row in rows)
    summary = f"of {every} passes {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
    notes = (
        f"ratio: our rate over theirs; {near} of {len(rows)} within 3 %; confirmed: within 1 % or both intervals; "
        "contradicted: all of it beyond 10 %; too uncertain: the intervals are wider than 3 %; beside: between these",
        *(
            f"{row.there.result.label} {row.there.result.case.label()} {row.there.short}: {row.differs}"
            for row in rows
            if row.differs
        ),
        *(f"skipped: {sentence}" for sentence in broken),
    )
    about = {"kind": "confirmed", "passes": every, "within_3_percent": near, **counts}
    return Page(about, (), (row_sheet(rows, pairs),), notes, headline=Headline((summary,)))
