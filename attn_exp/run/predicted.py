"""What earlier records predict of jobs that would run: the time of each pass, for `dry_run=true`."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from attn_exp.core.cpu import cpu_name
from attn_exp.core.hardware import datasheet_peak
from attn_exp.core.nvml import GpuInfo
from attn_exp.core.prediction import LEAST_CASES, Known, Prediction, Predictor, Rates
from attn_exp.core.request import Request
from attn_exp.core.text import figures
from attn_exp.results.cell import ChosenMetric, cells_of
from attn_exp.results.read import read_files
from attn_exp.results.result import Result
from attn_exp.results.there import sweeps_in

# Reading so many takes about a second; those of the newest sweeps.
_MOST_RECORDS = 2000
# Where a device has neither ceilings nor a datasheet; they only say where compute and memory balance.
_SOME_RATES = Rates(1e12, 1e11)


def predictions(requests: Sequence[Request], home: Path, gpus: Sequence[GpuInfo]) -> dict[str, dict[str, Prediction]]:
    """Return the predicted time of each pass by job, as far as records in the sweeps of a folder allow.

    Those of the same backend with the same options, on the same device.
    """
    devices = {"cuda": gpus[0].name if gpus else "", "cpu": cpu_name()}
    wanted = {(_key(one), side) for one in requests for side in one.measuring.passes}
    records = (path for sweep in reversed(sweeps_in(home)) for path in sorted(sweep.glob("*/record.json")))
    results, _ = read_files(islice(records, _MOST_RECORDS), missing_is_broken=False)
    known: dict[Any, list[Known]] = defaultdict(list)
    rates: dict[str, Rates] = {}
    for result in results:
        if result.device_name != devices.get(result.device):
            continue
        rates.setdefault(result.device, _rates(result))
        for cell in cells_of([result], ChosenMetric()):
            key = (result.key[1:], cell.direction)
            # A block's time is mostly that of its linear layers, which the roofline of its attention does not know.
            if cell.value is not None and key in wanted and result.case.workload is None:
                known[key].append(Known(result.case, cell.value, cell.half or 0.0))
    predictors = {
        key: Predictor(own, key[1], rates[key[0][2]])
        for key, own in known.items()
        if len({one.case for one in own}) >= LEAST_CASES
    }
    return {
        one.job: {
            side: predictors[_key(one), side].predict(one.case)
            for side in one.measuring.passes
            if (_key(one), side) in predictors and one.case.workload is None
        }
        for one in requests
    }


def predicted_text(times: dict[str, Prediction]) -> str:
    """Return the times of a job: `forward 12 us [11, 14], backward 30 us [27, 33]`, and how far they extrapolate."""
    said = [
        f"{side} {figures(one.time_us)} us [{figures(one.low_us)}, {figures(one.high_us)}]"
        for side, one in times.items()
    ]
    beyond: Iterable[str] = dict.fromkeys(way for one in times.values() for way in one.beyond)
    outside = ", ".join(beyond)
    return ", ".join(said) + (f" beyond what was measured ({outside})" if outside else "")


def _key(request: Request) -> tuple[Any, ...]:
    """Return a request's part of `Result.key` beside the case."""
    how = request.compile
    compiled = (how.mode, how.fullgraph, json.dumps(how.options, sort_keys=True))
    return json.dumps(request.backend, sort_keys=True), compiled, request.device, request.caches


def _rates(result: Result) -> Rates:
    peak = datasheet_peak(result.device_name)
    flops = result.ceilings.get("matmul_flops_per_s") or (peak and peak.flops_limit(result.case.dtype))
    moved = result.ceilings.get("copy_bytes_per_s") or (peak and peak.bytes_per_s)
    return Rates(flops, moved) if flops and moved else _SOME_RATES
