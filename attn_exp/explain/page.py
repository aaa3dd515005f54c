"""The pages of a job and of a sweep."""

import shlex
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_exp.core.case.case import NORMAL
from attn_exp.core.errors import RecordError, UserError
from attn_exp.core.files import write_whole
from attn_exp.core.record.file import LOG_NAME
from attn_exp.core.record.flags import FLAGS
from attn_exp.core.record.profile import FOLDER
from attn_exp.core.record.record import Record
from attn_exp.core.record.roofline import roof_of
from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.text import SHORT, WIDTH, duration, figures, filled, half_text
from attn_exp.explain.conditions import condition_lines, judged_lines
from attn_exp.explain.kernel_tables import kernel_tables
from attn_exp.explain.rivals import against_fastest, ground, kind, main_kernel, short
from attn_exp.results.cell import kernel_identity
from attn_exp.results.read import Sweep
from attn_exp.results.result import Result, named
from attn_exp.results.store import user_path
from attn_exp.results.table import table_order, time_text

# A page shows this many cases; `attn-exp compare` shows all.
_CASES = 6
_PLACEHOLDERS = ["SWEEP", "SWEEP/JOB"]
_DYNAMO = {"graphs": "graphs", "graph_breaks": "breaks", "recompilations": "recompiled"}


def sweep_page(sweep: Sweep) -> str:
    """Return the page of a sweep: a table per case, the fastest first, and which backends ran the same kernel."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in sorted(sweep.results, key=table_order):
        groups[ground(result)].append(result)
    cases = "one case" if len(groups) == 1 else f"{len(groups)} cases"
    first = next(iter(groups.values()))[0].path.parent
    # Runs of a store have no folder to name.
    words = [shlex.quote(str(user_path(one))) for one in (first.parent, first)] if first.is_dir() else _PLACEHOLDERS
    parts = [f"sweep {sweep.results[0].sweep}: {len(sweep.results)} jobs on {cases}"]
    for key, results in list(groups.items())[:_CASES]:
        several = sorted(named(results), key=lambda one: (one.status != "ok", _sum_us(one), one.label))
        # Without a device, because failed jobs have none.
        parts.append("\n".join([f"{key[0].label()}, {results[0].device_name}".rstrip(", "), "", _table(several)]))
        parts += ["\n".join(lines) for lines in [same_kernels(several)] if lines]
    if len(groups) > _CASES:
        parts.append(
            f"{len(groups) - _CASES} of the {cases} are left out here; all of them: attn-exp compare {words[0]}"
        )
    parts += [f"skipped: {sentence}" for sentence in sweep.broken]
    parts.append(f"a page about one job, as of the first: attn-exp explain {words[1]}")
    return "\n\n".join(parts)


def same_kernels(results: Sequence[Result]) -> list[str]:
    """Return for each pass which backends ran the same kernel, and on a GPU which kernel every other one ran.

    A kernel is named by the one in which most of the time is spent. On a CPU nothing is said of other operators: SDPA's
    is one wrapper around different implementations.
    """
    lines: list[str] = []
    on_cpu = kind(results[0]) != "kernel"
    for direction in SHORT:
        ran: dict[Any, list[Result]] = defaultdict(list)
        for result in results:
            if result.status == "ok" and direction in result.kernels:
                ran[kernel_identity(result, direction) or result.path].append(result)
        for together in sorted(ran.values(), key=lambda one: -len(one)):
            labels = ", ".join(one.label for one in together)
            name = short(main_kernel(together[0], direction))
            if len(together) > 1:
                lines.append(f"{direction}: {labels} ran the same kernel: {name}")
            elif not on_cpu:
                lines.append(f"{direction}: {labels} ran {name}")
    return lines


def _table(results: Sequence[Result]) -> str:
    passes = [direction for direction in SHORT if any(direction in result.measuring.passes for result in results)]
    counts = [name for name in _DYNAMO if any(_count(result, name) is not None for result in results)]
    rows = []
    for result in results:
        row = {"backend": result.label, "status": result.status}
        for direction in passes:
            for name, head in (("time_us", "us"), ("tflops", "TFLOPS")):
                value = result.metrics.get(f"{direction}/{name}")
                row[f"{SHORT[direction]} {head}"] = "" if value is None else figures(value)
        for name in counts:
            count = _count(result, name)
            row[_DYNAMO[name]] = "" if count is None else f"{count:.0f}"
        rows.append(row)
    return grid(sheet_of(rows))


def _count(result: Result, name: str) -> float | None:
    """Return one of Dynamo's counts, which are of the whole job: each pass has them."""
    return result.metrics.get(f"{result.measuring.passes[0]}/{name}")


def _sum_us(result: Result) -> float:
    return sum(value for name, value in result.metrics.items() if name.endswith("/time_us") and name.count("/") == 1)


PAGE = "explain.txt"


def keep_pages(results: Sequence[Result]) -> dict[str, Sequence[Path]]:
    """Write the page into `profiles/` of each profiled job, and return it by the job's name."""
    kept: dict[str, Sequence[Path]] = {}
    rivals: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        # Each page takes only the results of its own case: all pairs of a thousand jobs would be a million.
        rivals[ground(result)].append(result)
    for job in results:
        own = job.path.parent / FOLDER
        if job.status == "ok" and own.is_dir() and not own.is_symlink():
            write_whole(own / PAGE, f"{job_page(job, rivals[ground(job)])}\n".encode())
            kept[job.job] = [own / PAGE]
    return kept


_BEYOND = "there is no other job on the same case"


def job_page(job: Result, results: Sequence[Result]) -> str:
    """Return the page of a job: what ran, each kernel's time, what limits it, and how it compares with `results`.

    Raises UserError if the record was deleted or is broken.
    """
    try:
        record = job.record()
    except RecordError as error:
        raise UserError(f"{error}: run the sweep again") from error
    parts = [_head(job, record)]
    if record.status != "ok":
        log = job.path.parent / LOG_NAME
        output = [f"its output is in {user_path(log)}"] if log.is_file() and log.stat().st_size else []
        parts.append([f"{record.status}: {record.reason or ''}", *output])
    else:
        parts.append(["How long", *(_timed(record, direction) for direction in record.request.measuring.passes)])
        parts += [["Timers that disagree", *job.second_opinions]] if job.second_opinions else []
    parts += [["While it was timed", *lines] for lines in [condition_lines(record)] if lines]
    parts += [["What was judged", *lines] for lines in [judged_lines(record)] if lines]
    parts += [["What ran", *ran] for ran in [[*_compiled(record), *kernel_tables(record)]] if ran]
    if record.status == "ok":
        parts.append(["What limits it", *_bounds(record)])
        lines = [
            line for direction in record.request.measuring.passes for line in against_fastest(job, results, direction)
        ]
        parts.append(["Compared with the fastest on the same case", *(lines or [_BEYOND])])
    if record.profiles:
        parts.append(["Profiles", *_profiles(job, record)])
    if notes := [f"{flag}: {FLAGS[flag][1]}" for flag in record.flags if flag in FLAGS]:
        parts.append(["Flags", *notes])
    # Sentences are wrapped to the tables' width, tables are not.
    return "\n\n".join(
        "\n".join(line if "\n" in line or line.startswith("  ") else filled(line, WIDTH) for line in part)
        for part in parts
    )


def _head(job: Result, record: Record) -> list[str]:
    request, environment = record.request, record.environment
    versions = environment.get("versions") or {}
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.started_at))
    known = [
        record.device_name,
        f"torch {versions['torch']}" if versions.get("torch") else "",
        f"CUDA {environment['cuda']}" if environment.get("cuda") else "",
        f"timer {request.measuring.timer}",
        f"L2 {job.l2}" if job.l2 else "",
        f"inputs {job.measuring.inputs}" if job.measuring.inputs != NORMAL else "",
        "accumulated gradients" if job.measuring.accumulate else "",
        f"regime {job.measuring.regime}" if job.measuring.regime != "sustained" else "",
        f"{when}, {duration(max(0.0, record.finished_at - record.started_at))}",
    ]
    return [f"{record.label}: {request.case.label()}", ", ".join(filter(None, known)), str(user_path(job.path.parent))]


def _timed(record: Record, direction: str) -> str:
    metrics = record.metrics
    parts = [time_text(metrics[f"{direction}/time_us"])]
    half = metrics.get(f"{direction}/time_half_width")
    if half is not None:
        parts.append(f"+-{half_text(half)} %".replace("+->", "+- more than "))
    for name, unit in (("tflops", "TFLOPS"), ("gb_per_s", "GB/s of compulsory bytes")):
        if metrics.get(f"{direction}/{name}"):
            parts.append(f"{figures(metrics[f'{direction}/{name}'])} {unit}")
    kernel_us = metrics.get(f"{direction}/kernel_time_us")
    if kernel_us:
        parts.append(f"kernels {time_text(kernel_us)} by tracing")
    return f"{direction}: {', '.join(parts)}"


def _compiled(record: Record) -> list[str]:
    """Return what Dynamo did, and why it broke graphs."""
    if (made := record.compiled) is None:
        return []
    breaks = [f"graph break ({count}): {reason}" for reason, count in made.breaks.items()]
    counts = f"graphs {made.graphs}, breaks {sum(made.breaks.values())}, recompilations {made.recompilations}"
    return [f"Under torch.compile: {counts}", *breaks]


def _bounds(record: Record) -> list[str]:
    lines = []
    for direction in record.request.measuring.passes:
        roof = roof_of(record, direction)
        lines += [roof.sentence, *_stall(record, direction)] if roof else []
    return lines or ["the record has no ceilings or rates"]


def _stall(record: Record, direction: str) -> list[str]:
    """Return what warps wait for most, if `ncu` counted it."""
    counted = record.profiles["ncu"].metrics if "ncu" in record.profiles else {}
    begin, end = f"{direction}/stall_", "_share"
    shares = {name: value for name, value in counted.items() if name.startswith(begin) and name.endswith(end)}
    # `selected` warps issue an instruction: they do not wait.
    shares.pop(f"{begin}selected{end}", None)
    if not shares:
        return []
    most = max(shares, key=lambda name: shares[name])
    return [f"  its warps mostly wait for {most[len(begin) : -len(end)]}, {100 * shares[most]:.0f} % of their time"]


def _profiles(job: Result, record: Record) -> list[str]:
    lines = []
    for name, profile in record.profiles.items():
        reason = f": {profile.reason}" if profile.reason else ""
        lines.append(f"{name} {profile.status}{reason} ({duration(profile.seconds)})")
        lines += [f"  {user_path(job.path.parent / file)}" for file in profile.files]
    return lines
