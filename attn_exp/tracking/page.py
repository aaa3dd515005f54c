"""The page of a sweep's own run in MLflow: its description with links, its params, tags and metrics."""

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

from attn_exp.results.result import Result
from attn_exp.tracking.base import Summary, shown
from attn_exp.tracking.client import METRICS_BATCH, PARAM_LENGTH, PARAMS_BATCH, TAG_LENGTH, fitting, legal
from attn_exp.tracking.job_page import job_note

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

# MLflow shows the tag of this name as Markdown above everything else of a run.
NOTE = "mlflow.note.content"
# Artifacts that a description links, in this order; pictures follow.
_LINKED = {"report.html": "report", "table.csv": "all rows", "duel.txt": "report", "command.txt": "command"}
_PICTURES = ".png"
_CUT = "\n\n(cut: the report has the rest)"


def run_page(experiment: str, run: str) -> str:
    """Return the address of a run's page, relative to MLflow's first page."""
    return f"#/experiments/{experiment}/runs/{run}"


def store_summary(client: "MlflowClient", run: "Run", summary: Summary, artifacts: Sequence[str]) -> None:
    """Store what a sweep says as a whole. What is there already and is the same is not stored twice.

    Args:
        client: of the store.
        run: the sweep's own, as it is in the store.
        summary: what the sweep says.
        artifacts: the paths of the run's files.
    """
    from mlflow.entities import Param, RunTag

    tags = fitting({f"attn_exp.{name}": value for name, value in summary.tags.items() if value})
    if text := description(run.info.experiment_id, run.info.run_id, summary, artifacts):
        tags[NOTE] = text
    there = run.data.params
    # A parameter of MLflow cannot be changed or removed: a sweep that was continued with other values says so.
    wanted = {legal(key): value[:PARAM_LENGTH] for key, value in summary.params.items()}
    varied = sorted(key for key, value in there.items() if wanted.get(key) != value)
    tags |= fitting({"attn_exp.no_longer_shared": ", ".join(varied)} if varied else {})
    changed = [RunTag(key, value) for key, value in tags.items() if run.data.tags.get(key) != value]
    params = [Param(key, value) for key, value in wanted.items() if key not in there]
    metrics = [
        metric
        for metric in metrics_at(summary.metrics, summary.moment)
        if run.data.metrics.get(metric.key) != metric.value
    ]
    while metrics or params or changed:
        client.log_batch(run.info.run_id, metrics[:METRICS_BATCH], params[:PARAMS_BATCH], changed)
        metrics, params, changed = metrics[METRICS_BATCH:], params[PARAMS_BATCH:], []


def store_standing(client: "MlflowClient", run: str, result: Result, summary: Summary, answer: str) -> None:
    """Store what a job is among the others: its metrics, its description, and why it has no rank."""
    from mlflow.entities import RunTag

    own = {f"attn_exp.no_rank_{side}": why for side, why in summary.undecided.get(result.job, {}).items()}
    own[NOTE] = job_note(result, result.measuring, summary.standing.get(result.job, {}), answer)
    metrics = metrics_at(summary.of_jobs.get(result.job, {}), summary.moment)
    client.log_batch(run, metrics, tags=[RunTag(key, value) for key, value in fitting(own).items()])


def metrics_at(values: Mapping[str, float], moment: float | None) -> "list[Metric]":
    """Return metrics of a moment in seconds since 1970, or of now: of several values the one of the latest counts."""
    from mlflow.entities import Metric

    moment_ms = int((time.time() if moment is None else moment) * 1000)
    return [Metric(legal(name), shown(value), moment_ms, 0) for name, value in values.items()]


def description(experiment: str, run: str, summary: Summary, artifacts: Sequence[str]) -> str:
    """Return the Markdown of a sweep's run: its answer, links to its files and jobs, and the rest as far as it fits."""
    text = "\n\n".join(filter(None, [summary.answer, links(experiment, run, artifacts), summary.description]))
    if len(text) <= TAG_LENGTH:
        return text
    return text[: TAG_LENGTH - len(_CUT)].rpartition("\n")[0] + _CUT


def links(experiment: str, run: str, artifacts: Sequence[str]) -> str:
    """Return links to a run's files and to the jobs below it, relative to the address of MLflow's page."""
    page = f"{run_page(experiment, run)}/artifacts"
    named = [(words, name) for name, words in _LINKED.items() if name in artifacts]
    named += [(PurePosixPath(name).stem, name) for name in sorted(artifacts) if name.endswith(_PICTURES)]
    return " · ".join(f"[{words}]({page}/{quote(name)})" for words, name in named)
