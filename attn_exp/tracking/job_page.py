"""The page of a job's run in MLflow: its description, its flags, and when it ended."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Protocol

from attn_exp.core.flags import doubts, flags_in
from attn_exp.core.record import Record
from attn_exp.core.request import Measuring
from attn_exp.core.safe_text import markdown_text
from attn_exp.core.text import SHORT, figures, printable
from attn_exp.results.table import time_text


class Job(Protocol):
    """What a record and a result have in common."""

    @property
    def status(self) -> str:
        """How the job ended."""

    @property
    def reason(self) -> str | None:
        """Why it has no result; None if it has one."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Its metrics, by pass."""


def job_note(job: Job, measuring: Measuring, standing: Mapping[str, str], answer: str) -> str:
    """Return the description of a job's run as Markdown: what it took, and what that is among its rivals.

    Args:
        job: a record or a result.
        measuring: what its request asked for.
        standing: by pass, what the job is among those of its case; empty while the sweep runs.
        answer: the address of the sweep's own page.
    """
    lines = []
    if job.status != "ok":
        lines.append(f"**{job.status}: {markdown_text(printable(job.reason or 'no reason is known'))}**")
    for direction in measuring.passes:
        time_us = job.metrics.get(f"{direction}/time_us") if job.status == "ok" else None
        if time_us is not None:
            rate = job.metrics.get(f"{direction}/tflops")
            took = f"**{time_text(time_us)}**" + (f", {figures(rate)} TFLOPS" if rate else "")
            lines.append("; ".join(filter(None, [f"{direction}: {took}", markdown_text(standing.get(direction, ""))])))
    return "  \n".join([*lines, f"[the sweep's answer]({answer})"])


def doubt_mark(record: Record) -> str:
    """Return `?`, as tables mark a row that decides nothing, if a record's times are in doubt; of one pass `bwd?`."""
    of_passes = {name: measured.flags for name, measured in record.passes.items()}
    marked = [SHORT[name] for name in of_passes if doubts(flags_in(record.flags, of_passes, name))]
    return " ".join(f"{name}?" for name in marked) if len(marked) < len(of_passes) else "?" if marked else ""


def flags_by_pass(record: Record) -> str:
    """Return the flags of a record, those of one pass with its name: `busy_host, unstable (backward)`."""
    of_passes = {name: measured.flags for name, measured in record.passes.items()}
    said = []
    for flag in record.flags:
        passes = [name for name, flags in of_passes.items() if flag in flags]
        said.append(flag if len(passes) in (0, len(of_passes)) else f"{flag} ({', '.join(passes)})")
    return ", ".join(said)


def ended_at(record: Record) -> str:
    """Return when a record was finished, to the microsecond: `2026-03-01 12:00:01.250000 UTC`."""
    return datetime.fromtimestamp(record.finished_at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
