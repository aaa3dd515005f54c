"""Run the checks that a machine is measured correctly: `python -m attn_exp.doctor.run_checks DEVICE`.

`attn-exp doctor` starts it. Each check is a function from a bench to a finding: what was checked, the measured figures,
and whether they pass.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.backends.package import Unavailable
from attn_exp.backends.sdpa import Flash, Math
from attn_exp.core.case.case import Case
from attn_exp.core.live_line import STAGE, STAGES
from attn_exp.core.record.flags import host_reading, others_cores, telemetry_flags
from attn_exp.doctor import clock_checks
from attn_exp.doctor.bench import MEASURING, Bench, Finding, attention, flash_request, open_bench
from attn_exp.results.calibration import Calibration, device_key, write_calibration
from attn_exp.timers.gpu import MARK
from attn_exp.timers.trace import Activity, split_calls
from attn_exp.worker.measure import measure


def alarms_fire(bench: Bench) -> Finding:
    """10: throttling, other programs on the GPU, a wrong backend behind a label, a NaN, a lost profiler record."""
    throttled = [{"held_back_ns": {"power": 0, "thermal": 0}}, {"held_back_ns": {"power": 5, "thermal": 5}}]
    shared = [{"processes": 2, "sm_clock_mhz": 300}]
    alarms = {
        "throttle": telemetry_flags(throttled, None) == {"power_capped", "thermal"},
        "shared GPU, low clock": telemetry_flags(shared, 1980) == {"shared_gpu", "clock_low"},
        "lost record": split_calls([Activity(name, 0, 1.0) for name in (MARK, "flush", MARK, "a", MARK)], 1).lossy,
        "wrong kernel": _status(bench, f"{__name__}:Mislabelled") == "wrong_kernel",
        "NaN": _status(bench, f"{__name__}:Spoiled") == "inaccurate",
    }
    silent = [name for name, fired in alarms.items() if not fired]
    return Finding(
        "alarms fire", not silent, "silent: " + ", ".join(silent) if silent else f"all {len(alarms)} of them"
    )


class Mislabelled(Flash):
    """Claims flash and runs the formula."""

    choice = Math.choice


class Spoiled(Flash):
    """One element of its output is NaN."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return flash's calls with a spoiled output."""
        calls = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            out = calls.forward().clone()
            out[0, 0, 0, 0] = math.nan
            return out

        return replace(calls, forward=forward)


def _status(bench: Bench, target: str) -> str:
    device = bench.machine.device
    case, _ = attention(device, batch=1, length=128, heads=2, dim=64)
    timer, also = ("device", ("kernel",)) if device == "cuda" else ("cpu", ())
    measuring = replace(MEASURING, timer=timer, also=also)
    request = flash_request(device, case, measuring)
    request = replace(request, backend={**request.backend, "_target_": target})
    return measure(request, bench.machine).status


# Half a processor: the doctor itself is not counted.
_INTERFERENCE = 0.5
CHECKS: dict[str, tuple[Callable[[Bench], Finding], ...]] = {
    "cuda": (
        clock_checks.sleep_is_linear,
        clock_checks.event_floor_is_known,
        clock_checks.copy_reaches_the_datasheet,
        clock_checks.twice_the_work_takes_twice_as_long,
        clock_checks.timers_agree,
        clock_checks.a_busy_host_does_not_count,
        clock_checks.the_flush_makes_caches_cold,
        clock_checks.equal_things_are_equal,
        clock_checks.differences_are_found,
        alarms_fire,
        clock_checks.a_plain_loop_takes_as_long,
    ),
    "cpu": (
        clock_checks.twice_the_work_takes_twice_as_long,
        clock_checks.equal_things_are_equal,
        clock_checks.differences_are_found,
        alarms_fire,
    ),
}


def tell(stage: str, share: float = 0.0) -> None:
    """Tell the parent, which shows it, what begins or goes on, and which share of it is done."""
    if os.environ.get(STAGES):
        print(f"{STAGE}{share:.4f} {stage}", flush=True)


def run(device: str) -> int:
    """Run the checks of a device and print a line for each; return how many failed."""
    tell("opening the device and measuring its ceilings")
    try:
        bench = open_bench(device)
    except Unavailable as error:
        print(f"FAIL {error}")
        return 1
    if device == "cpu":
        print("checks 1 to 3 and 5 to 7 need a GPU and are skipped")
    failed = []
    before = host_reading()
    for check in CHECKS[device]:
        number = int((check.__doc__ or "0").split(":")[0])
        began = time.perf_counter()
        what = f"check {number}, {check.__name__.replace('_', ' ')}"
        tell(what)
        bench.progress = partial(tell, what)
        try:
            finding = check(bench)
        except Exception as error:  # a check that raises has failed, and the others still run
            finding = Finding(check.__name__.replace("_", " "), False, f"{type(error).__name__}: {error}")
        if not finding.passed:
            failed.append(check)
        seconds = time.perf_counter() - began
        word = "pass" if finding.passed else "FAIL"
        print(f"{word} {number:>2} {finding.name}: {finding.seen}  [{seconds:.0f} s]", flush=True)
    others = others_cores(before, host_reading())
    if others > _INTERFERENCE:
        again = "run the failed checks again" if failed else "the margin may be smaller"
        print(f"other programs kept {others:.1f} processors busy: {again} on an idle machine")
    if failed or not bench.comparisons:
        print("the margin is not stored, because not every check passed")
        return len(failed)
    calibration = Calibration(
        device=device_key(bench.machine.environment),
        margin=bench.margin,
        ceilings=bench.machine.ceilings_for("bfloat16" if device == "cuda" else "float32"),
    )
    margin = f"the margin {100 * calibration.margin:.2f} %"
    try:
        print(f"{margin} and ceilings are stored in {write_calibration(calibration)}")
    except OSError as error:
        print(f"{margin} cannot be stored ({error}): set ATTN_EXP_STATE to another folder")
    return len(failed)


if __name__ == "__main__":
    try:
        sys.exit(1 if run(sys.argv[1]) else 0)
    except KeyboardInterrupt:
        sys.exit(130)
