"""The page of one job."""

import textwrap
import time
from collections.abc import Iterable

from attn_exp.compare.result import Result
from attn_exp.errors import UserError
from attn_exp.explain.kernel_tables import kernel_tables
from attn_exp.explain.rivals import standing
from attn_exp.flags import flag_notes
from attn_exp.record import LOG_NAME, Record, RecordError
from attn_exp.report import duration, time_text
from attn_exp.roofline import roof_of
from attn_exp.store import near
from attn_exp.tables import WIDTH, figures

_BEYOND = "there is no job on the same case beside it"


def job_page(job: Result, results: Iterable[Result]) -> str:
    """What ran, how long each kernel, what bounds it, and how it differs from the fastest of `results`.

    Raises:
        UserError: the record is gone or broken.
    """
    try:
        record = job.record()
    except RecordError as error:
        raise UserError(f"{error}: run the sweep again") from error
    several = list(results)
    parts = [_head(job, record)]
    if record.status != "ok":
        parts.append([f"{record.status}: {record.reason}", f"what it printed is in {near(job.path.parent / LOG_NAME)}"])
    else:
        parts.append(["How long", *(_timed(record, direction) for direction in record.request.measuring.passes)])
    parts += [["What ran", *tables] for tables in [kernel_tables(record)] if tables]
    if record.status == "ok":
        parts.append(["What bounds it", *_bounds(record)])
        said = [line for direction in record.request.measuring.passes for line in standing(job, several, direction)]
        parts.append(["Against the fastest on the same case", *(said or [_BEYOND])])
    if record.profiles:
        parts.append(["Profiles", *_profiles(job, record)])
    notes = flag_notes(record.flags)
    if notes:
        parts.append(["Marks", *notes])
    return "\n\n".join("\n".join(_wrapped(part)) for part in parts)


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
        f"regime {job.measuring.regime}" if job.measuring.regime != "sustained" else "",
        f"{when}, {duration(max(0.0, record.finished_at - record.started_at))}",
    ]
    return [f"{record.label}: {request.case.label()}", ", ".join(filter(None, known)), str(near(job.path.parent))]


def _timed(record: Record, direction: str) -> str:
    found = record.metrics
    said = [time_text(found[f"{direction}/time_us"])]
    half = found.get(f"{direction}/time_half_width")
    if half is not None:
        said.append(f"+-{100 * half:.1f} %")
    for name, unit in (("tflops", "TFLOPS"), ("gb_per_s", "GB/s of compulsory bytes")):
        if found.get(f"{direction}/{name}"):
            said.append(f"{figures(found[f'{direction}/{name}'])} {unit}")
    kernel_us = found.get(f"{direction}/kernel_time_us")
    if kernel_us:
        said.append(f"kernels alone {time_text(kernel_us)} by tracing")
    return f"{direction}: {', '.join(said)}"


def _bounds(record: Record) -> list[str]:
    said = []
    for direction in record.request.measuring.passes:
        roof = roof_of(record, direction)
        said += [roof.sentence, *_stall(record, direction)] if roof else []
    return said or ["no ceilings or rates are in the record, so nothing can be said"]


def _stall(record: Record, direction: str) -> list[str]:
    """What warps wait for most, where `ncu` counted it."""
    counted = record.profiles["ncu"].metrics if "ncu" in record.profiles else {}
    begin, end = f"{direction}/stall_", "_share"
    shares = {name: value for name, value in counted.items() if name.startswith(begin) and name.endswith(end)}
    # Of a warp that is chosen to issue nobody says that it waits.
    shares.pop(f"{begin}selected{end}", None)
    if not shares:
        return []
    most = max(shares, key=lambda name: shares[name])
    return [f"  its warps wait most for {most[len(begin) : -len(end)]}, {100 * shares[most]:.0f} % of their time"]


def _profiles(job: Result, record: Record) -> list[str]:
    said = []
    for name, profile in record.profiles.items():
        reason = f": {profile.reason}" if profile.reason else ""
        said.append(f"{name} {profile.status}{reason} ({duration(profile.seconds)})")
        said += [f"  {near(job.path.parent / file)}" for file in profile.files]
    return said


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Sentences in the tables' width; tables have several lines and are left alone."""
    return [
        line if "\n" in line or line.startswith("  ") else textwrap.fill(line, WIDTH, subsequent_indent="  ")
        for line in lines
    ]
