"""Curves as runs in MLflow, of which the steps are sequence lengths; each is there once, however often it is stored."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_exp.trackers.base import Curve
from attn_exp.trackers.client import METRICS_BATCH, PARAM_LENGTH, legal, search, whole_run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def keep_curves(client: "MlflowClient", experiment: str, parent: "Run", curves: Sequence[Curve]) -> None:
    """Store the curves of a sweep: those that are there stay, others of the sweep go."""
    wanted = {_digest(curve): curve for curve in curves}
    of_parent = {"mlflow.parentRunId": parent.info.run_id, "attn_exp.kind": "curve"}
    for run in search(client, experiment, of_parent):
        # What was cut short holds nothing that could be wanted.
        digest = run.data.tags.get("attn_exp.curve", "") if run.info.status == "FINISHED" else ""
        if wanted.pop(digest, None) is None:
            client.delete_run(run.info.run_id)
    for digest, curve in wanted.items():
        _create(client, experiment, parent, curve, digest)


def _create(client: "MlflowClient", experiment: str, parent: "Run", curve: Curve, digest: str) -> None:
    from mlflow.entities import Metric, Param

    own = {"kind": "curve", "sweep": parent.data.tags["attn_exp.sweep"], "label": curve.label, "curve": digest}
    tags = {f"attn_exp.{key}": value for key, value in own.items()} | {"mlflow.parentRunId": parent.info.run_id}
    points = [
        Metric(legal(name), value, int(curve.moment * 1000), step)
        for name, values in curve.points.items()
        for step, value in values
        if math.isfinite(value)
    ]
    params = [Param(legal(key), value[:PARAM_LENGTH]) for key, value in curve.params.items()]

    def fill(run: "Run") -> None:
        for begin in range(0, len(points), METRICS_BATCH):
            client.log_batch(run.info.run_id, points[begin : begin + METRICS_BATCH], params if begin == 0 else ())

    whole_run(client, experiment, curve.name, tags, (curve.moment, curve.moment), "FINISHED", fill)


def _digest(curve: Curve) -> str:
    """What tells a curve from any other, so that the same sweep again stores none twice."""
    what = [curve.name, sorted(curve.params.items()), sorted(curve.points.items())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
