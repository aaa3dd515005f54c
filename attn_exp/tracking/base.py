"""The interface of trackers, and the flat view of a record that they store."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from attn_exp.core.case.fields import typed_fields
from attn_exp.core.catalogue import colour_of, recorded_about
from attn_exp.core.record.checked import told
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.core.record.roofline import roof_metrics, roof_of
from attn_exp.core.source import short
from attn_exp.core.text import flat
from attn_exp.results.result import Result

EndStatus = Literal["FINISHED", "KILLED", "FAILED"]

_LONGEST_KERNEL_NAME = 250
# The metric by which the list of a sweep is sorted: 0 is the sweep's own run, then the jobs by case, the fastest first.
LIST_PLACE = "list_place"
# The tag from which MLflow takes a run's colour.
RUN_COLOUR = "mlflow.runColor"


@dataclass(frozen=True)
class SweepInfo:
    """The facts about a sweep that a tracker needs: its name, its folder, and the command that started it.

    `began` is its start in seconds since 1970; None means now.
    """

    name: str
    folder: Path
    command: str
    began: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One backend's metrics over sequence length: (length, value) pairs by metric, ordered by length.

    `moment` is its position in time among the sweep's jobs, in seconds since 1970.
    """

    name: str
    label: str
    colour: str
    params: Mapping[str, str]
    points: dict[str, tuple[tuple[int, float], ...]]
    moment: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of a sweep, for its own run.

    Attributes:
        answer: the answer that the sweep was run for, in Markdown. Links to its files stand behind it.
        description: the rest of the summary, in Markdown.
        params: the parameters that all of its jobs share.
        tags: short texts, without the prefix `attn_exp.`.
        metrics: the sweep's own numbers.
        of_jobs: the place of each job among the others, as metrics by job.
        standing: the place of each job in words, by job and pass.
        results: the jobs, whose pages have descriptions.
        curves: metrics over sequence length.
        files: files of the sweep's folder.
        job_files: further files of single jobs, by job.
        moment: the end of its last job, in seconds since 1970; None if it has none.
    """

    answer: str = ""
    description: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    of_jobs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    standing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    results: Sequence[Result] = ()
    curves: Sequence[Curve] = ()
    files: Sequence[Path] = ()
    job_files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    moment: float | None = None


class Tracker:
    """Stores the records of one sweep without delaying its measurements; this one, `tracker=none`, stores nothing."""

    # Whether something is missing in the store at the end.
    lacks = False

    def open(self, sweep: SweepInfo) -> str | None:
        """Check the location, then open the store in the background; return a sentence if it does not answer.

        Raises UserError if the location is invalid, cannot be written, or refuses this user.
        """
        return None

    def where(self) -> str | None:
        """Return where the sweep is logged, as its first line; None if nowhere, or where it always is."""
        return None

    def log(self, record: Record, folder: Path) -> None:
        """Queue a finished job with the files in its folder, and return at once."""

    def quiet(self) -> None:
        """Wait until nothing that is queued takes processor time of this host, so that a CPU can be measured."""

    def settle(self) -> None:
        """Wait until everything queued is stored."""

    def note(self) -> str | None:
        """Return what is to be known of what was stored, as a sentence for the end of a sweep; None if nothing is."""
        return None

    def look(self) -> str | None:
        """Return how to view the runs, as the end of the sentence "look at them ..."; None if there are none."""
        return None

    def replay_command(self) -> str | None:
        """Return the command that stores what is missing; None if nothing is stored."""
        return None

    def close(
        self,
        status: EndStatus,
        summary: Summary = Summary(),
        timeout_s: float = math.inf,
        told: Callable[[str], None] = lambda text: None,
    ) -> str | None:
        """Store what is left and end the sweep; return a sentence if something could not be stored. Never raise.

        Items not stored after `timeout_s` are given up; they remain in their folders. `told` is called with how much is
        left.
        """
        return None


def params(job: Request | Result) -> dict[str, str]:
    """Return the resolved configuration of a job, under flat names that are easy to sort and filter.

    A feature that the job lacks (no window, no second timer) has no parameter.
    """
    measuring = job.measuring
    values = typed_fields(job.case, square=job.case.square)
    options = {key: value for key, value in flat(job.backend).items() if key != "_target_"}
    values |= {"backend" if key == "name" else f"backend.{key}": value for key, value in options.items()}
    values |= {"model": job.model, "device": job.device, "seed": measuring.seed, "timer": measuring.timer}
    values |= {"also": "+".join(measuring.also), "passes": "+".join(measuring.passes)}
    values |= {"compile": job.compile.mode, "caches": job.caches}
    values |= flat(job.compile.options, "compile.") | flat(job.source, "source.")
    for name in ("precision", "min_rounds", "max_rounds", "budget_s"):
        values[f"stopping.{name}"] = getattr(measuring, name)
    values |= {"determinism": measuring.determinism or None, "accumulate": measuring.accumulate or None}
    values |= {"gold": measuring.gold if measuring.gold != "float32" else None}
    values |= {"regime": measuring.regime, "l2": measuring.l2, "inputs": measuring.inputs}
    return {key: str(value) for key, value in values.items() if value not in (None, "")}


def shown(value: float) -> float:
    """Return a metric as MLflow shows it, which prints all digits: whole from 1000 on, else with four digits."""
    return float(round(value)) if abs(value) >= 1000 else float(f"{value:.4g}")


def metrics(record: Record) -> dict[str, float]:
    """Return the metrics of a record, its profiles and its roofline with four digits, without infinite ones and NaN."""
    case = record.request.case
    values = record.metrics | roof_metrics(record)
    # The case's sizes too: MLflow sorts, filters and plots parameters as text.
    for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"):
        values[f"case/{name}"] = float(getattr(case, name))
    if case.square:
        values["case/seq_len"] = float(case.q_len)
    for profiler, profile in record.profiles.items():
        values |= {f"{profiler}/{name}": value for name, value in profile.metrics.items()}
    return {name: shown(value) for name, value in values.items() if math.isfinite(value)}


def tags(record: Record) -> dict[str, str]:
    """Return the tags of a record: outcome, flags, case, hardware, versions, kernels, and its colour."""
    request, environment, case = record.request, record.environment, record.request.case
    values: dict[str, Any] = {
        "sweep": request.sweep,
        "kind": "job",
        "job": request.job,
        "finished_at": ended_at(record),
        "status": record.status,
        "reason": record.reason,
        "flags": _flags_by_pass(record),
        "gpu": record.device_name,
        # Most often it is the parameter `backend`.
        "label": record.label if record.label != request.backend.get("name") else None,
        "case": case.label(),
        "torch": environment.get("versions", {}).get("torch"),
        "method_version": record.method_version,
        "source": short(request.source),
    }
    values |= {name: environment.get(name) for name in ("cuda", "cudnn", "driver", "git_commit", "host")}
    for direction, measured in record.passes.items():
        if measured.kernels:
            longest = max(measured.kernels, key=lambda kernel: kernel.time_us)
            values[f"kernel_{direction}"] = longest.name[:_LONGEST_KERNEL_NAME]
        roof = roof_of(record, direction)
        values[f"bound_{direction}"] = roof.bound if roof else None
        values[f"same_bits_{direction}"] = told(measured.bitwise)
        values[f"timers_disagree_{direction}"] = "; ".join(map(str, measured.disagreements))
    for profiler, profile in record.profiles.items():
        values[f"profiler_{profiler}"] = ": ".join(filter(None, (profile.status, profile.reason)))
    tags = {f"attn_exp.{name}": str(value) for name, value in values.items() if value not in (None, "")}
    commit = str(environment.get("git_commit") or "").removesuffix("-dirty")
    name, configured = str(request.backend.get("name", "?")), request.config.get("backend")
    colour = colour_of(name, recorded_about(name, configured.get("about") if isinstance(configured, dict) else None))
    return tags | {RUN_COLOUR: colour} | ({"mlflow.source.git.commit": commit} if commit else {})


def ended_at(record: Record) -> str:
    """Return when a record was finished, to the microsecond: `2026-03-01 12:00:01.250000 UTC`."""
    return datetime.fromtimestamp(record.finished_at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def _flags_by_pass(record: Record) -> str:
    """Return the flags of a record, those of one pass with its name: `busy_host, unstable (backward)`."""
    of_passes = {name: measured.flags for name, measured in record.passes.items()}
    words = []
    for flag in record.flags:
        passes = [name for name, flags in of_passes.items() if flag in flags]
        words.append(flag if len(passes) in (0, len(of_passes)) else f"{flag} ({', '.join(passes)})")
    return ", ".join(words)
