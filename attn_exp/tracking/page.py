"""The pages of a sweep's run and of a job's run in MLflow: descriptions with links, params, tags and metrics."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Measuring
from attn_exp.core.sheet.render import markdown_text
from attn_exp.core.text import figures, printable
from attn_exp.results.result import Result
from attn_exp.results.table import time_text
from attn_exp.tracking.base import Summary, shown
from attn_exp.tracking.client import TAG_LENGTH, fitting, legal, log_values

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

# MLflow shows the tag of this name as Markdown above everything else of a run.
NOTE = "mlflow.note.content"
# The digest of a description as it was written here, in a tag that MLflow's pages do not list.
_NOTE_DIGEST = "mlflow.note.attn_exp"
# Artifacts that a description links, in this order; pictures follow.
_LINKED = {"report.html": "report", "table.csv": "all rows", "command.txt": "command"}
_PICTURES = ".png"
_CUT = "\n\n(cut: the report has the rest)"


def run_page(experiment: str, run: str, below: str = "") -> str:
    """Return the address of a run's page, or of a page below it, relative to MLflow's first page."""
    # On a first visit MLflow 3 opens its pages for language models otherwise.
    return f"#/experiments/{experiment}/runs/{run}{below}?workflowType=machine_learning"


def note_tags(text: str) -> dict[str, str]:
    """Return the tags of a description."""
    return {NOTE: text, _NOTE_DIGEST: _digest(text)}


def is_edited(tags: Mapping[str, str]) -> bool:
    """Return whether somebody changed the description of a run with these tags: it stays."""
    return NOTE in tags and tags.get(_NOTE_DIGEST) != _digest(tags[NOTE])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def store_summary(client: "MlflowClient", run: "Run", summary: Summary, artifacts: Sequence[str]) -> None:
    """Store the summary of a sweep in its own `run`. What is there already, and is the same, is not stored twice."""
    tags = fitting({f"attn_exp.{name}": value for name, value in summary.tags.items() if value})
    text = description(run.info.experiment_id, run.info.run_id, summary, artifacts)
    if text and not is_edited(run.data.tags):
        tags |= note_tags(text)
    there = run.data.params
    # A parameter of MLflow cannot be changed or removed: a sweep that was continued with other values says so.
    wanted = legal(summary.params)
    if varied := sorted(key for key, value in there.items() if wanted.get(key) != value):
        tags["attn_exp.no_longer_shared"] = ", ".join(varied)
    metrics = metrics_at(summary.metrics, summary.moment)
    log_values(
        client,
        run.info.run_id,
        [metric for metric in metrics if run.data.metrics.get(metric.key) != metric.value],
        {key: value for key, value in tags.items() if run.data.tags.get(key) != value},
        {key: value for key, value in wanted.items() if key not in there},
    )


def store_standing(
    client: "MlflowClient", run: str, result: Result, summary: Summary, answer: str, *, with_note: bool
) -> None:
    """Store what a job is among the others: its metrics, and its description unless somebody edited it."""
    note = job_note(result, result.measuring, summary.standing.get(result.job, {}), answer)
    metrics = metrics_at(summary.of_jobs.get(result.job, {}), summary.moment)
    log_values(client, run, metrics, note_tags(note) if with_note else {})


def metrics_at(values: Mapping[str, float], moment: float | None) -> "list[Metric]":
    """Return metrics of a moment in seconds since 1970, or of now: of several values the one of the latest counts."""
    from mlflow.entities import Metric

    moment_ms = int((time.time() if moment is None else moment) * 1000)
    return [Metric(name, shown(value), moment_ms, 0) for name, value in legal(values).items()]


def description(experiment: str, run: str, summary: Summary, artifacts: Sequence[str]) -> str:
    """Return the Markdown of a sweep's run: its answer, links to its files and jobs, and the rest as far as it fits."""
    text = "\n\n".join(filter(None, [summary.answer, links(experiment, run, artifacts), summary.description]))
    if len(text) <= TAG_LENGTH:
        return text
    return text[: TAG_LENGTH - len(_CUT)].rpartition("\n")[0] + _CUT


def links(experiment: str, run: str, artifacts: Sequence[str]) -> str:
    """Return links to a run's files and to the jobs below it, relative to the address of MLflow's page."""
    named = [(words, name) for name, words in _LINKED.items() if name in artifacts]
    named += [(PurePosixPath(name).stem, name) for name in sorted(artifacts) if name.endswith(_PICTURES)]
    return " · ".join(f"[{words}]({run_page(experiment, run, f'/artifacts/{quote(name)}')})" for words, name in named)


def job_note(job: Record | Result, measuring: Measuring, standing: Mapping[str, str], answer: str) -> str:
    """Return the description of a job's run as Markdown: what it took, and what that is among its rivals.

    `standing` is the job's place among those of its case, by pass; empty while the sweep runs.
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
