"""Compare a sweep with published figures, counting FLOPs as they do."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_exp.compare.comparison import Comparison, case_order, summarize_sweep
from attn_exp.compare.page_parts import case_part, case_values
from attn_exp.compare.sheet import Column, Sheet
from attn_exp.core.case import DTYPES, PASSES, Case
from attn_exp.core.case_fields import case_columns
from attn_exp.core.errors import UserError, brief
from attn_exp.core.files import read_whole
from attn_exp.core.flops import flops, flops_common_convention
from attn_exp.core.hardware import datasheet_peak
from attn_exp.core.safe_text import printable_text
from attn_exp.results.cell import Cell, ChosenMetric
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result

# Columns that are required to match a case; a file may omit all others.
_NEEDED = (("tflops",), ("q_len", "seq_len"))
_NO_WINDOW = ("", "none", "null", "0", "-1")
# TFLOPS that are believed: 1 to 10^15 MFLOPS.
_RATES = (1e-6, 1e9)
_YES_NO = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure: TFLOPS of one pass, and the fields of the case that its file specifies.

    `deterministic` says whether the backward sums in a fixed order; None if the file does not say.
    """

    source: str
    gpu: str
    library: str
    version: str
    direction: str
    case: Mapping[str, Any]
    tflops: float
    deterministic: bool | None = None


@dataclass(frozen=True, slots=True)
class PublishedMatch:
    """One of our cells and a published figure of the same shape.

    `tflops` is ours in their convention, `ratio` ours over theirs. `same_library` says whether our backend runs that
    library; otherwise it is the fastest backend of the case. `same_gpu` is None if either GPU is unknown.
    """

    cell: Cell
    figure: Figure
    tflops: float
    ratio: float
    same_library: bool
    same_gpu: bool | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Published(Comparison):
    """A sweep and the published figures of a file; `figures` is the number of figures in the file."""

    rows: tuple[PublishedMatch, ...]
    figures: int

    def sheet(self) -> Sheet:
        """Return a row for each of our cells and each figure of its shape."""
        columns = (
            *case_part([row.cell for row in self.rows]),
            Column("pass", "pass"),
            Column("backend", "ours"),
            Column("tflops", "ours TFLOPS", "figure"),
            Column("library", "published"),
            Column("version", "version", spare=2),
            Column("published_tflops", "their TFLOPS", "figure"),
            Column("ratio", "ratio", "ratio"),
            Column("published_gpu", "their GPU", spare=1),
            Column("gpu", ""),
            Column("same_gpu", "same GPU"),
            Column("same_library", ""),
            Column("source", ""),
            Column("job", ""),
        )
        rows = tuple(
            (
                *case_values(row.cell),
                row.cell.direction,
                row.cell.result.label,
                row.tflops,
                row.figure.library,
                row.figure.version,
                row.figure.tflops,
                row.ratio,
                row.figure.gpu,
                row.cell.result.device_name,
                _YES_NO[row.same_gpu],
                row.same_library,
                row.figure.source,
                row.cell.result.job,
            )
            for row in self.rows
        )
        return Sheet("rows", "", columns, rows)


def compare_published(
    sweeps: Sequence[Sweep], cells: Sequence[Cell], file: Path, *, notes: Sequence[str] = ()
) -> Published:
    """Compare cells with the figures of a CSV file.

    Raises:
        UserError: the file cannot be read, lacks a column, or has no figure of a shape that was measured.
    """
    figures, left_out = read_figures(file)
    rows = [row for figure in figures for row in _matches(figure, cells)]
    if not rows:
        shapes = sorted({cell.result.case.label() for cell in cells})
        unused = "".join(f"; {sentence}" for sentence in left_out)
        raise UserError(f"no figure in {file} is of a shape in the sweep: that has {', '.join(shapes[:3])} ...{unused}")
    rows.sort(key=lambda row: (*case_order(row.cell), row.figure.library, row.figure.source))
    other = {f"{row.figure.gpu} there, {row.cell.result.device_name} here" for row in rows if row.same_gpu is False}
    sentences = [f"another GPU: {words}; such ratios do not compare implementations" for words in sorted(other)]
    windows = any(row.figure.case["window"] is not None for row in rows)
    unmeasured = sorted({row.figure.library for row in rows if not row.same_library})
    if unmeasured:
        sentences.append(f"{', '.join(unmeasured)}: not measured here, compared with the fastest backend")
    return Published(
        metric=ChosenMetric(),
        sweeps=tuple(summarize_sweep(sweep) for sweep in sweeps),
        notes=(
            *notes,
            "TFLOPS in the published convention: 4 S S D per head, half under a causal mask, 2.5 times backward",
            *(["under a sliding window the pairs that it keeps are counted"] if windows else ()),
            *sentences,
            *left_out,
            *(
                f"{library} from: {source}"
                for library, source in dict.fromkeys((r.figure.library, r.figure.source) for r in rows)
            ),
        ),
        broken=tuple(sentence for sweep in sweeps for sentence in sweep.broken),
        rows=tuple(rows),
        figures=len(figures),
    )


def read_figures(file: Path) -> tuple[list[Figure], list[str]]:
    """Return the figures of a CSV file, and a sentence about rows that cannot be used.

    Raises:
        UserError: the file cannot be read, or lacks a required column.
    """
    try:
        # Excel begins UTF-8 with a mark.
        reader = csv.DictReader(io.StringIO(read_whole(file).decode("utf-8-sig"), newline=""))
        names = set(reader.fieldnames or ())
        for choices in _NEEDED:
            if not names & set(choices):
                raise UserError(f"{file} has no column {' or '.join(choices)}: its first line must name the columns")
        rows = list(reader)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {file}") from error
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file} cannot be read as CSV ({error}): give published=FILE.csv") from error
    figures, wrong = [], []
    for number, row in enumerate(rows, start=2):
        try:
            figures.append(_figure(row))
        except ValueError as error:
            wrong.append(brief(f"{file.name} line {number}: {error}"))
    sentences = wrong[:3] + ([f"{len(wrong) - 3} more lines of {file.name} cannot be used"] if len(wrong) > 3 else [])
    return figures, sentences


def _figure(row: Mapping[str, str | None]) -> Figure:
    """Return the figure of one row; empty columns match any case. Raises ValueError if it is not a figure."""
    # Of endless words and of line breaks a table or a sentence would be illegible.
    values = {
        name: brief(printable_text(" ".join((value or "").split()))) for name, value in row.items() if name is not None
    }
    tflops = float(values["tflops"])
    if not _RATES[0] <= tflops <= _RATES[1]:
        raise ValueError(f"tflops={values['tflops']} is not a rate")
    direction = values.get("pass") or "forward"
    if direction not in PASSES:
        raise ValueError(f"pass={direction} is not one of {', '.join(PASSES)}")
    if "seq_len" in values:
        values = {"q_len": values["seq_len"], "kv_len": values["seq_len"]} | values
    case: dict[str, Any] = {"window": _window(values.get("window", ""))}
    for name in case_columns():
        text = values.get(name, "")
        if text and name != "window":
            case[name] = _value(name, text)
    source, gpu, library, version = (values.get(name, "") for name in ("source", "gpu", "library", "version"))
    deterministic = {"true": True, "false": False}.get(values.get("deterministic", "").lower())
    return Figure(source, gpu, library, version, direction, case, tflops, deterministic)


def _window(text: str) -> int | None:
    """Return the keys that a sliding window keeps, None for none. Raises ValueError if the text is neither."""
    if text.lower() in _NO_WINDOW:
        return None
    number = float(text)
    if not number.is_integer() or number < 1:
        raise ValueError(f"window={text} is not a number of keys")
    return int(number)


def _value(name: str, text: str) -> Any:
    if name == "dtype":
        return DTYPES.get(text.lower(), text.lower())
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _matches(figure: Figure, cells: Sequence[Cell]) -> list[PublishedMatch]:
    """Match a figure with our cells of its library, or with the fastest if that library was not measured."""
    there = [cell for cell in cells if cell.value is not None and cell.direction == figure.direction]
    there = [cell for cell in there if _same_case(cell.result.case, figure.case)]
    # Only backwards have an algorithm that is deterministic, and another.
    if figure.deterministic is not None and figure.direction != "forward":
        there = [cell for cell in there if (cell.result.backend.get("deterministic") is True) == figure.deterministic]
    own = [cell for cell in there if _is_library(cell.result, figure.library)]
    # The fastest of each case, because a figure may leave sizes open.
    fastest = {cell.result.case: cell for cell in sorted(there, key=lambda cell: cell.value or 0.0, reverse=True)}
    matches = []
    for cell in own or fastest.values():
        assert cell.value is not None
        count = flops if cell.result.case.window is not None else flops_common_convention
        ours = count(cell.result.case, figure.direction) / (cell.value / 1e6) / 1e12
        gpus = _gpu(figure.gpu), _gpu(cell.result.device_name)
        same = gpus[0] == gpus[1] if figure.gpu and cell.result.device_name else None
        matches.append(PublishedMatch(cell, figure, ours, ours / figure.tflops, bool(own), same))
    return matches


def _same_case(case: Case, wanted: Mapping[str, Any]) -> bool:
    if case.workload is not None:
        return False  # a block's time is not that of its attention
    for name, value in wanted.items():
        ours = getattr(case, name)
        if name == "dtype" and value == "fp8":
            if not ours.startswith("float8"):
                return False
        elif name == "align":
            if not case.square and ours != value:
                return False
        elif ours != value:
            return False
    return True


def _is_library(result: Result, library: str) -> bool:
    """Whether the backend runs what a published file calls `library`, by its `about.published_as`."""
    return not set(library.lower().split()).isdisjoint(result.about.published_as)


def _gpu(name: str) -> str:
    """Return a GPU's name as the datasheet has it, so that `H200 SXM` and `NVIDIA H200` are equal."""
    peak = datasheet_peak(name)
    return peak.name if peak else name
