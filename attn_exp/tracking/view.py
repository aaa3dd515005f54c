"""Views at which MLflow's pages open: a list of sweeps with their answers, or the charts of one sweep.

An address names a state of MLflow's run list, which is stored as a tag of the experiment.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attn_exp.core.case.case import HALVES
from attn_exp.core.text import SHORT
from attn_exp.tracking.base import LIST_PLACE
from attn_exp.tracking.client import quoted

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Columns in addition to those that MLflow always shows: backend and outcome first. Widths in pixels: a window 1,400
# wide shows everything up to the passes' times, ranks and speed-ups.
_NAME_COLUMN, _NAME_WIDTH = "attributes.`Run Name`", 260
# Only of sweeps: jobs leave it empty, as sweeps leave most others.
ANSWER_COLUMN = "tags.`attn_exp.answer`"
_OF_JOBS = {
    "params.`backend`": 90,
    **{f"metrics.`{side}/{name}`": 125 for side in HALVES for name in ("time_us", "rank", "speedup")},
    "tags.`attn_exp.status`": 110,
    "tags.`attn_exp.flags`": 200,
    **{f"metrics.`{side}/tflops`": 125 for side in HALVES},
    **{f"params.`{name}`": 90 for name in ("batch", "seq_len", "q_len", "kv_len", "head_dim", "dtype", "causal")},
    "tags.`attn_exp.gpu`": 150,
}
# Numbers of jobs and of curves over length that one compares first, with the titles of their charts, in which `{}` is
# the pass: MLflow cuts titles, so that their beginnings differ. Charts of all other numbers are below them.
_BARS = {"speedup": "speed-up {}", "time_us": "us {}", "tflops": "TFLOPS {}"}
_CURVES = {"tflops_by_length": "{} TFLOPS over length", "time_us_by_length": "{} us over length"}
# The charts to show, of some 60 metrics: a regular expression for their names.
_CHARTS = "^(time_us|tflops)(_by_length)?$"
_CHARTS_OF_JOBS = "^(?!.*(best_in|list_place|jobs))"


def store_view(
    client: "MlflowClient", experiment: str, sweep: str | None = None, params: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Store the state of the list of sweeps, or of one sweep whose run has these parameters, in their experiment.

    Returns:
        The address of MLflow's list in that state, relative to MLflow's first page.
    """
    passes = params["passes"].split("+") if "passes" in params else HALVES
    state = all_sweeps() if sweep is None else one_sweep(sweep, passes)
    key = "attn_exp" if sweep is None else f"attn_exp_{_identity(sweep)[:8]}"
    # MLflow's pages read such a tag of the experiment, and the workflow shows none of its pages for language models.
    client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{key}", json.dumps(state, separators=(",", ":")))
    page = f"#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={key}"
    return page if sweep is None else f"{page}&compareRunsMode=CHART"


def all_sweeps() -> dict[str, Any]:
    """Return the state of the list of sweeps, newest first, with their answers and their jobs.

    MLflow nests jobs below their sweep only if the list is sorted by time; otherwise the list is flat.
    """
    return _list({ANSWER_COLUMN: 420, **_OF_JOBS}) | {
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "searchFilter": "",
        "chartsSearchFilter": _CHARTS,
    }


def one_sweep(sweep: str, passes: Sequence[str] = HALVES) -> dict[str, Any]:
    """Return the state of one sweep: its own run, its jobs and curves, in charts that have its backends' colours."""
    section = {
        "uuid": _identity(sweep),
        # MLflow has room for some forty letters.
        "name": f"{sweep}: backends compared",
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }
    cards = [
        _card(kind, sweep, f"{side}/{name}", title.format(SHORT[side]), more)
        for kind, titles, more in (("BAR", _BARS, {}), ("LINE", _CURVES, _OVER_LENGTH))
        for name, title in titles.items()
        for side in passes
    ]
    return _list(_OF_JOBS) | {
        # More bars in a chart have no room for their labels.
        "runsHiddenMode": "FIRST_10_RUNS",
        # The sweep's own run is the first one: one click leads to its answer. Sorted by time, MLflow would hide all
        # others below it.
        "orderByKey": f"metrics.`{LIST_PLACE}`",
        "orderByAsc": True,
        "searchFilter": f"tags.`attn_exp.sweep` = {quoted(sweep)}",
        "chartsSearchFilter": _CHARTS_OF_JOBS,
        # Our section stays above those that MLflow makes of all other metrics.
        "isAccordionReordered": True,
        "compareRunCharts": cards,
        "compareRunSections": [section],
    }


# Lengths are powers of two.
_OVER_LENGTH = {
    "xAxisKey": "step",
    "useGlobalXaxisKey": False,
    "xAxisScaleType": "log",
    "scaleType": "log",
    "displayPoints": True,
    "lineSmoothness": 0,
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "range": {},
}


def _list(columns: dict[str, int]) -> dict[str, Any]:
    return {
        "selectedColumns": list(columns),
        "columnOrder": [_NAME_COLUMN, *columns],
        "columnWidths": {_NAME_COLUMN: _NAME_WIDTH, **columns},
        "groupBy": None,
        "runsHiddenMode": "SHOW_ALL",
    }


def _card(kind: str, sweep: str, metric: str, title: str, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": _identity(f"{sweep}/{metric}"),
        "metricSectionId": _identity(sweep),
        "metricKey": metric,
        "displayName": title,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 10,
        **more,
    }


def _identity(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"attn_exp/{name}"))
