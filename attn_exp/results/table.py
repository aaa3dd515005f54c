"""Tables of results: the line of one job, a sweep's table, and its CSV. `Session._finish` calls `write_tables`."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from attn_exp.core.case.case import NORMAL
from attn_exp.core.case.fields import MASK_FIELDS, case_columns, typed_fields, with_mask
from attn_exp.core.errors import UserError
from attn_exp.core.files import write_whole
from attn_exp.core.record.checked import yes_or_no
from attn_exp.core.record.flags import flag_marks, flag_notes
from attn_exp.core.record.metrics import METRICS, metric_named
from attn_exp.core.sheet.render import fitted, json_of, sheet_csv, sheet_markdown
from attn_exp.core.sheet.sheet import Column, Sheet, sheet_of, split
from attn_exp.core.source import commit
from attn_exp.core.text import SHORT, WIDTH, figures, filled, flat, half_text, plain, word
from attn_exp.results.cell import metric_names, passes_shown
from attn_exp.results.fields import OF_MEASURING
from attn_exp.results.result import Result, named

_CASE_NAMES = ("model", "seq_len", *case_columns(), "embed_dim", *OF_MEASURING, "seed", "device")
# How many pairs of timers that disagree a table lists.
_OPINIONS = 5
FORMATS = ("table", "json", "csv", "markdown")
# The columns that a page has room for, besides the metrics of each pass.
_PAGE_COLUMNS = (
    *("label", "status", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "dtype", "causal", "flags"),
)
_PAGE_METRICS = ("time_us", "time_half_width", "tflops")
# Facts of the environment: versions, and settings that move times; a GPU's are those of its record only.
_FACTS = (
    *("cuda", "cudnn", "driver"),
    *("power_limit_w", "ecc", "gpu_numa_node", "matmul_precision", "matmul_tf32", "cudnn_tf32"),
    *("bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction"),
    *("cpu", "cpu_threads", "cpu_affinity", "numa_nodes", "cpu_governor", "cpu_capability", "cpu_instruction_sets"),
)
# Columns that a narrow terminal may omit, the least important first. A key that is swept is none: only after these, and
# the columns to its right, does it go.
_DISPENSABLE = ("embed_dim", "fwd\nerror", "bwd\nerror", "fwd\n+-%", "bwd\n+-%", "bwd\nTFLOPS", "fwd\nTFLOPS")
# A model says these; where models differ in them, its name may stand for them.
_OF_MODEL = ("latent", "value_dim", "head_dim", "kv_heads", "q_heads")


def time_text(us: float) -> str:
    """Format a time with four significant digits in a suitable unit: `14.26 us`, `3.790 ms`."""
    for unit, size in (("us", 1.0), ("ms", 1e3)):
        if us < 1000 * size:
            return f"{us / size:.4g} {unit}"
    return f"{us / 1e6:.4g} s"


def job_line(result: Result, options: Sequence[str] = ()) -> str:
    """Return the line of one job: status, backend, case, then time and TFLOPS, or the reason for their absence.

    `options` are the backend options in which jobs of the sweep differ.
    """
    values = flat(result.backend)
    shown_options = [f"{name}={word(values[name])}" for name in options if name in values]
    kind = [] if result.measuring.inputs == NORMAL else [f"inputs {result.measuring.inputs}"]
    kind += ["accumulate"] if result.measuring.accumulate else []
    kind += [f"gold {result.measuring.gold}"] if result.measuring.gold != "float32" else []
    head = " ".join([f"{result.status:<12}", f"{result.label} {result.case.label()}", *kind, *shown_options])
    if result.status != "ok":
        return f"{head}: {result.reason}"
    passes = []
    for name in result.measuring.passes:
        time_us, tflops = result.metrics[f"{name}/time_us"], result.metrics.get(f"{name}/tflops")
        passes.append(f"{SHORT[name]} {time_text(time_us)}" + (f" {figures(tflops)} TFLOPS" if tflops else ""))
    return f"{head}  {'  '.join(passes)}  {flag_marks(result.flags)}".rstrip()


def check_columns(columns: Any) -> tuple[str, ...]:
    """Return the metrics that `columns=` asks for. Raises UserError if it is no list of metrics."""
    names = columns if isinstance(columns, list) else [columns]
    for name in names:
        if not isinstance(name, str) or not metric_named(name).description:
            raise UserError(f"columns={name} is no list of metrics, which are {', '.join(METRICS)}: columns=[gb_per_s]")
    return tuple(names)


def table(results: Sequence[Result], width: int = WIDTH, columns: Sequence[str] = ()) -> str:
    """Return the table of a sweep, `width` columns wide, with shared values above and explanations below.

    `columns` are more metrics to show.
    """
    if not results:
        return "no records"
    passes = passes_shown(results)
    square = all(result.case.square for result in results)
    masked = with_mask({result.case for result in results})
    rows = [_row(result, passes, columns, square=square, masked=masked) for result in _ordered(results)]
    shared = {
        name: rows[0][name] for name in _CASE_NAMES if name in rows[0] and len({str(row[name]) for row in rows}) == 1
    }
    rows = [{name: value for name, value in row.items() if name not in shared} for row in rows]
    if shared.get("inputs") == NORMAL:
        del shared["inputs"]
    by_model = [name for name in _OF_MODEL if {"model", name} <= rows[0].keys() and _follows(rows, name)]
    text, left_out = fitted(sheet_of(rows, (*by_model, *_DISPENSABLE)), width)
    devices = sorted({result.device_name for result in results})
    said = [f"{name} {value}" for name, value in shared.items() if value is not None and name != "seed"]
    lines = [", ".join([*filter(None, devices), *said]), "", text]
    if empty := [name for name in columns if name not in metric_names(results)]:
        lines.append(f"no job has {', '.join(empty)}: attn-exp explain says why")
    if left_out:
        lines.append(f"omitted to fit the width: {', '.join(left_out)}; table.csv has these columns")
    if "+-%" in text:
        lines.append("+-%: half-width of the 95 % confidence interval across rounds")
    lines += flag_notes(flag for result in results for flag in result.flags)
    lines += opinion_notes(_ordered(results))
    lines += [f"* {reason}" for reason in sorted({result.reason for result in results if result.reason})]
    return "\n".join(line if line is text else filled(line, width) for line in lines)


def _follows(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """Return whether rows of one model have one value."""
    return len({(row["model"], str(row[name])) for row in rows}) == len({row["model"] for row in rows})


def csv_text(results: Sequence[Result]) -> str:
    """Return one row per result with all its metrics, for spreadsheets and scripts."""
    return sheet_csv(_every_column(results))


def _every_column(results: Sequence[Result]) -> Sheet:
    """Return the sheet of `table.csv`. Pages have only those of its columns that they have room for."""
    passes = passes_shown(results)
    columns, values = split(
        (
            (_column("job"), lambda result: result.job),
            (_column("status"), lambda result: result.status),
            (_column("reason"), lambda result: result.reason or ""),
            (_column("backend"), lambda result: result.backend["name"]),
            (_column("label"), lambda result: result.label),
            (_column("compile"), lambda result: result.compile.mode),
            (_column("model"), lambda result: result.model),
            *((_column(name), partial(_of_case, name)) for name in (*case_columns(), "embed_dim")),
            (_column("device"), lambda result: result.device),
            *((_column(name), attrgetter(f"measuring.{name}")) for name in OF_MEASURING),
            (_column("caches"), lambda result: result.caches),
            (_column("source"), lambda result: result.source.get("sha256", "")[:16]),
            (_column("source_commit"), lambda result: commit(result.source)),
            (_column("seed"), lambda result: result.measuring.seed),
            (_column("flags"), lambda result: " ".join(result.flags)),
            (_column("second_opinions"), lambda result: "; ".join(result.second_opinions)),
            *((_column(name), partial(_metric, name)) for name in _metric_names(results, passes)),
            *((_column(f"{side}/kernels"), partial(_kernels, side)) for side in passes),
            *((_column(name), partial(_fact, name)) for name in ("gpu", "gpu_uuid")),
            (_column("torch"), lambda result: result.environment.get("versions", {}).get("torch", "")),
            *((_column(name), partial(_fact, name)) for name in _FACTS),
            (_column("finished_at"), lambda result: f"{result.finished_at:.3f}"),
        )
    )
    return Sheet("results", "", columns, tuple(map(values, _ordered(results))))


def _column(name: str) -> Column:
    on_pages = name in _PAGE_COLUMNS or name.partition("/")[2] in _PAGE_METRICS
    return Column(name, name if on_pages else "")


def _of_case(name: str, result: Result) -> Any:
    value = getattr(result.case, name)
    # True and False in files, and in Markdown as well.
    return str(value) if isinstance(value, bool) else value


def _metric(name: str, result: Result) -> str:
    return f"{result.metrics[name]:.6g}" if name in result.metrics else ""


def _kernels(side: str, result: Result) -> str:
    return " | ".join(kernel.split("(")[0] for kernel in result.kernels.get(side, ()))


def _fact(name: str, result: Result) -> Any:
    return result.environment.get(name, "")


def write_tables(results: Sequence[Result], folder: Path, columns: Sequence[str] = ()) -> list[Path]:
    """Write `table.txt`, with more `columns`, and `table.csv` into a sweep's folder and return their paths."""
    text, comma = folder / "table.txt", folder / "table.csv"
    write_whole(text, f"{table(results, columns=columns)}\n".encode())
    write_whole(comma, csv_text(results).encode())
    return [text, comma]


def _ordered(results: Iterable[Result]) -> list[Result]:
    """Order results by case size, so that backends of one case are adjacent, and make labels unique."""
    return named(sorted(results, key=table_order))


def table_order(result: Result) -> tuple[Any, ...]:
    """Return what sorts results by their cases' sizes, then by backend."""
    case = [getattr(result.case, name) for name in case_columns()]
    sizes = [(value is not None, value) for value in case]
    return (result.model, *sizes, result.measuring.inputs, result.label, result.job)


def _metric_names(results: Iterable[Result], passes: Sequence[str]) -> list[str]:
    """Return the metrics of each pass in the order of core/record/metrics.py, unknown ones last."""
    order = {name: index for index, name in enumerate(METRICS)}
    known = {name for entry in METRICS.values() for name in entry.columns}
    measured = {name for result in results for name in result.metrics}
    names = measured | {f"{side}/{name}" for side in passes for name in known}

    def place(name: str) -> tuple[int, int, str]:
        side, _, own = name.partition("/")
        return passes.index(side), order.get(metric_named(own).name, len(order)), own

    return sorted((name for name in names if name.partition("/")[0] in passes), key=place)


def _row(
    result: Result, passes: Sequence[str], columns: Sequence[str], *, square: bool, masked: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"backend": result.label, "model": result.model}
    values = typed_fields(result.case, square=square)
    if masked:
        values = {name: value for name, value in values.items() if name not in MASK_FIELDS} | {
            "mask": str(result.case.mask)
        }
    row |= {name: plain(value) for name, value in values.items()}
    row["embed_dim"] = result.case.embed_dim
    way = result.measuring
    row |= {"timer": way.timer, "regime": way.regime, "l2": way.l2, "inputs": way.inputs}
    row |= {"accumulate": plain(way.accumulate or None), "gold": plain(None if way.gold == "float32" else way.gold)}
    row |= {"seed": way.seed, "device": result.device}
    row["status"] = result.status if result.status == "ok" else f"{result.status}*"
    for side in passes:
        short, metrics = SHORT[side], result.metrics
        if f"{side}/time_us" in metrics:
            half = metrics.get(f"{side}/time_half_width")
            row[f"{short}\nus"] = figures(metrics[f"{side}/time_us"], half)
            row[f"{short}\n+-%"] = half_text(half)
            tflops = metrics.get(f"{side}/tflops")
            row[f"{short}\nTFLOPS"] = figures(tflops, half) if tflops else ""
            of_pass = {key.partition("/")[2]: value for key, value in metrics.items() if key.startswith(f"{side}/")}
            errors = [value for key, value in of_pass.items() if metric_named(key).name == "error_{tensor}"]
            row[f"{short}\nerror"] = f"{max(errors):.1e}" if errors else ""
        else:
            row |= {f"{short}\n{name}": "" for name in ("us", "+-%", "TFLOPS", "error")}
    for column in columns:
        for side in passes:
            value = result.metrics.get(f"{side}/{column}")
            text = yes_or_no if metric_named(column).is_fact else figures
            # Heads on several lines, since figures are short.
            row["\n".join([SHORT[side], *metric_named(column).head.split()])] = "" if value is None else text(value)
    row["marks"] = flag_marks(result.flags)
    return row


def opinion_notes(results: Iterable[Result]) -> list[str]:
    """Return a sentence for each of the first pairs of timers that disagree, and how many there are beside them."""
    every = list({id(row): row for row in results if row.second_opinions}.values())
    sentences = [
        f"timers disagree, {row.label} {row.case.label()}, {words}" for row in every for words in row.second_opinions
    ]
    rest = len(sentences) - _OPINIONS
    more = [f"... and {rest} more pairs of timers disagree: second_opinions in table.csv has all"] if rest > 0 else []
    return sentences[:_OPINIONS] + more


def rendered(
    results: Sequence[Result], form: str, width: int, answer: Sequence[str] = (), columns: Sequence[str] = ()
) -> str:
    """Return the results in a format; JSON and Markdown have the lines of the answer, too.

    CSV has the columns of `table.csv`, JSON the same as numbers where they are numbers, without empty ones.
    """
    if form == "table":
        return table(results, width, columns)
    if form == "csv":
        return csv_text(results).rstrip("\n")
    sheet = _every_column(results)
    if form == "json":
        rows = [{name: _number(str(value)) for name, value in row.items() if value not in (None, "")}
                for row in sheet.dictionaries()]  # fmt: skip
        return json_of({"answer": list(answer), "results": rows})
    return "\n\n".join(filter(None, ["  \n".join(answer), sheet_markdown(sheet) if results else "no records"]))


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
