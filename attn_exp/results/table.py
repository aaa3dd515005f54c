"""Report: a sweep's records as the lines, table and CSV that a person reads."""

import csv
import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attn_exp.core.case import case_columns
from attn_exp.core.flags import flag_marks, flag_notes
from attn_exp.core.record import Record, settings
from attn_exp.core.text import SHORT, WIDTH, figures, fitted, flat, plain, told_apart, word

_CASE_NAMES = ("backend", "model", *case_columns(), "timer", "regime", "l2", "seed", "device")
# What a table can do without if the terminal is narrow, the first first.
_DISPENSABLE = ("device", "timer", "model", "align", "fwd\nerror", "bwd\nerror", "fwd\n+-%", "bwd\n+-%", "dtype")
_CSV_METRICS = (
    "time_us",
    "time_low_us",
    "time_high_us",
    "tflops",
    "tflops_sdpa_convention",
    "gb_per_s",
    "min_bytes",
    "flops_of_measured",
    "flops_of_peak",
    "bandwidth_of_measured",
    "bandwidth_of_peak",
    "kernel_time_us",
    "event_time_us",
    "peak_memory_bytes",
    "first_call_s",
    "samples",
    "rounds",
)
_CSV_ERRORS = {"forward": ("out",), "backward": ("dq", "dk", "dv", "dx")}


def duration(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def time_text(us: float) -> str:
    """Four significant digits in the unit that suits: `14.26 us`, `3.790 ms`."""
    for unit, size in (("us", 1.0), ("ms", 1e3)):
        if us < 1000 * size:
            return f"{us / size:.4g} {unit}"
    return f"{us / 1e6:.4g} s"


def job_line(record: Record, options: Sequence[str] = ()) -> str:
    """One job in one line: status, who, what, and its time and TFLOPS or the reason why there are none.

    `options` are those of the backend that jobs of the sweep differ in.
    """
    own = flat(record.request.backend)
    told = [f"{name}={word(own[name])}" for name in options if name in own]
    head = " ".join([f"{record.status:<12}", record.request.label, *told])
    if record.status != "ok":
        return f"{head}: {record.reason}"
    passes = []
    for name in record.request.measuring.passes:
        time_us, tflops = record.metrics[f"{name}/time_us"], record.metrics.get(f"{name}/tflops")
        passes.append(f"{SHORT[name]} {time_text(time_us)}" + (f" {figures(tflops)} TFLOPS" if tflops else ""))
    return f"{head}  {'  '.join(passes)}  {marks(record)}".rstrip()


def marks(record: Record) -> str:
    """The short marks of a record's flags."""
    return flag_marks(record.flags)


def table(records: Sequence[Record], width: int = WIDTH) -> str:
    """One row a record, in `width` columns: what all share stands above, marks and reasons are explained below."""
    if not records:
        return "no records"
    ordered = sorted(records, key=_order)
    rows = [_row(record) | {"backend": label} for record, label in zip(ordered, _labels(ordered), strict=True)]
    shared = {name: rows[0][name] for name in _CASE_NAMES if len({str(row[name]) for row in rows}) == 1}
    shared.pop("backend", None)  # who it was stands in every row, also if it was the same everywhere
    shown = [name for name in rows[0] if name not in shared and any(row[name] not in (None, "") for row in rows)]
    text, left_out = fitted(rows, shown, _DISPENSABLE, width)
    devices = sorted({record.device_name for record in records})
    lines = [
        ", ".join(
            [
                *filter(None, devices),
                *(f"{name} {value}" for name, value in shared.items() if value is not None and name != "seed"),
            ]
        ),
        "",
    ]
    lines.append(text)
    if left_out:
        names = ", ".join(" ".join(name.split()) for name in left_out)
        lines.append(f"not shown for want of width: {names}; table.csv has all")
    lines += flag_notes(flag for record in records for flag in record.flags)
    lines += [f"* {reason}" for reason in sorted({record.reason for record in records if record.reason})]
    return "\n".join(line if line is text else textwrap.fill(line, width, subsequent_indent="  ") for line in lines)


def csv_text(records: Iterable[Record]) -> str:
    """One row a record with all its numbers, for spreadsheets and scripts."""
    buffer = io.StringIO()
    names = [
        *("job", "status", "reason", "backend", "label", "compile", "model", *case_columns()),
        *("device", "timer", "regime", "l2", "caches", "seed", "flags"),
        *(f"{name}/{metric}" for name in SHORT for metric in (*_CSV_METRICS, *_errors(name))),
        *("forward/kernels", "backward/kernels", "gpu", "gpu_uuid", "torch", "cuda", "cudnn", "driver", "finished_at"),
    ]
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    ordered = sorted(records, key=_order)
    for record, label in zip(ordered, _labels(ordered), strict=True):
        writer.writerow(_csv_row(record, names) | {"label": label})
    return buffer.getvalue()


def write_tables(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write `table.txt` and `table.csv` into a sweep's folder; their paths."""
    text, comma = folder / "table.txt", folder / "table.csv"
    text.write_text(table(records) + "\n")
    comma.write_text(csv_text(records))
    return [text, comma]


def _order(record: Record) -> tuple[Any, ...]:
    """Rivals of one case stand together, cases in the order of their sizes."""
    case = [getattr(record.request.case, name) for name in case_columns()]
    sizes = [(value is not None, value) for value in case]
    return (record.request.model, *sizes, record.label, record.request.job)


def _labels(records: Sequence[Record]) -> list[str]:
    """Who each row is about; with its options where others of the same name have others."""
    asked = [record.request for record in records]
    options = [settings(request.backend, request.compile, caches=request.caches) for request in asked]
    return told_apart([record.label for record in records], options)


def _errors(direction: str) -> list[str]:
    return [f"error_{tensor}" for tensor in _CSV_ERRORS[direction]]


def _row(record: Record) -> dict[str, Any]:
    request = record.request
    row: dict[str, Any] = {"backend": record.label, "model": request.model}
    row |= {name: plain(getattr(request.case, name)) for name in case_columns()}
    way = request.measuring
    row |= {"timer": way.timer, "regime": way.regime, "l2": way.l2, "seed": way.seed, "device": request.device}
    row["status"] = record.status if record.status == "ok" else f"{record.status}*"
    for name, short in SHORT.items():
        found = record.metrics
        if f"{name}/time_us" in found:
            half = found.get(f"{name}/time_half_width")
            row[f"{short}\nus"] = figures(found[f"{name}/time_us"])
            row[f"{short}\n+-%"] = "" if half is None else f"{100 * half:.1f}" if half < 10 else ">999"
            tflops = found.get(f"{name}/tflops")
            row[f"{short}\nTFLOPS"] = figures(tflops) if tflops else ""
            errors = [value for key, value in found.items() if _is_error(key, name)]
            row[f"{short}\nerror"] = f"{max(errors):.1e}" if errors else ""
        else:
            row |= {f"{short}\n{name}": "" for name in ("us", "+-%", "TFLOPS", "error")}
    row["marks"] = marks(record)
    return row


def _is_error(name: str, direction: str) -> bool:
    """Whether a metric is the relative error of a tensor of this pass, a block's weights included."""
    return name.startswith(f"{direction}/error_") and not name.endswith(("_worst_row", "_max_abs"))


def _csv_row(record: Record, names: Sequence[str]) -> dict[str, Any]:
    request, found = record.request, record.environment
    row: dict[str, Any] = {
        "job": request.job,
        "status": record.status,
        "reason": record.reason or "",
        "backend": request.backend["name"],
        "compile": request.compile.mode,
        "model": request.model,
        "device": request.device,
        "timer": request.measuring.timer,
        "regime": request.measuring.regime,
        "l2": request.measuring.l2,
        "caches": request.caches,
        "seed": request.measuring.seed,
        "flags": " ".join(record.flags),
        "torch": found.get("versions", {}).get("torch", ""),
        "finished_at": f"{record.finished_at:.3f}",
    }
    row |= {name: getattr(request.case, name) for name in case_columns()}
    row |= {name: found.get(name, "") for name in ("gpu", "gpu_uuid", "cuda", "cudnn", "driver")}
    for name, measured in record.passes.items():
        row[f"{name}/kernels"] = " | ".join(kernel.name.split("(")[0] for kernel in measured.kernels)
    row |= {name: f"{value:.6g}" for name, value in record.metrics.items() if name in names}
    return row
