"""On a GPU: names of one kernel agree in a case's turns, at one clock. Ratios and clocks, never times."""

import math
import statistics
from dataclasses import replace

import pytest
from fakes import make_request
from test_gpu import SDPA, gpu_case

from attn_exp.worker.measure import measure_case

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# The same kernel: chosen by its own backend, and by a class with another name.
NAMES = {"cudnn": SDPA["cudnn"], "again": SDPA["cudnn"], "flash": SDPA["flash"]}
OPTIONS = {"timer": "device", "also": (), "precision": 0.005, "min_rounds": 10, "max_rounds": 80, "budget_s": 0.1}


def requests(regime):
    case = gpu_case(batch=4, heads=16, q_len=4096, dim=128, causal=True)
    for name, target in NAMES.items():
        request = make_request({"_target_": target, "name": name}, case, regime=regime, **OPTIONS)
        yield replace(request, job=f"{name}-0", device="cuda")


@pytest.mark.parametrize(("regime", "apart"), [("burst", 0.01), ("sustained", 0.025)])
def test_one_kernel_under_two_names_takes_one_time(machine, regime, apart):
    records = measure_case(list(requests(regime)), machine)
    assert [record.status for record in records] == ["ok"] * 3, [record.reason for record in records]
    for direction in ("forward", "backward"):
        timings = [record.passes[direction].timings[0] for record in records]
        one, other, slower = (statistics.median(timing.times_us) for timing in timings)
        assert abs(math.log(other / one)) < apart, (direction, one, other)
        assert slower > 1.2 * one
        bases = {record.passes[direction].paired.base for record in records}
        assert bases <= {"cudnn-0", "again-0"}
        for timing in timings:
            assert len(timing.clocks_mhz) == len(timing.blocks)
            if regime == "burst":
                assert "below_clock" not in timing.flags
                assert min(timing.clocks_mhz) >= 0.97 * max(timing.clocks_mhz)
            else:
                assert timing.notes["duty"] >= 0.95
