"""python -m attn_exp.proofs DEVICE: the proofs that a machine is measured right; `python -m attn_exp.doctor` runs them.

Each proof is a function from a bench to a finding: what was asked, what was seen, and whether that is good enough.
"""

import sys
import time
from collections.abc import Callable

from attn_exp.backends.package import Unavailable
from attn_exp.calibration import Calibration, device_key, write_calibration
from attn_exp.host import host_reading, others_cores
from attn_exp.proofs.alarms import alarms_fire
from attn_exp.proofs.bench import Bench, Finding, open_bench
from attn_exp.proofs.clocks import (
    a_busy_host_does_not_count,
    copy_reaches_the_datasheet,
    event_floor_is_known,
    sleep_is_linear,
    the_flush_makes_caches_cold,
    timers_agree,
    twice_the_work_takes_twice_as_long,
)
from attn_exp.proofs.verdicts import differences_are_found, equal_things_are_equal

# Half a processor: the doctor itself is not counted.
_COMPANY = 0.5
PROOFS: dict[str, tuple[Callable[[Bench], Finding], ...]] = {
    "cuda": (
        sleep_is_linear,
        event_floor_is_known,
        copy_reaches_the_datasheet,
        twice_the_work_takes_twice_as_long,
        timers_agree,
        a_busy_host_does_not_count,
        the_flush_makes_caches_cold,
        equal_things_are_equal,
        differences_are_found,
        alarms_fire,
    ),
    "cpu": (twice_the_work_takes_twice_as_long, equal_things_are_equal, differences_are_found, alarms_fire),
}


def run(device: str) -> int:
    """Run the proofs of a device, a line each; how many failed."""
    try:
        bench = open_bench(device)
    except Unavailable as error:
        print(f"FAIL {error}")
        return 1
    if device == "cpu":
        print("proofs 1 to 3 and 5 to 7 are about a GPU's clocks and caches: there is none to test here")
    broken = []
    before = host_reading()
    for proof in PROOFS[device]:
        number = int((proof.__doc__ or "0").split(":")[0])
        began = time.perf_counter()
        try:
            finding = proof(bench)
        except Exception as error:  # a proof that cannot be led is a failed one, and the others still count
            finding = Finding(proof.__name__.replace("_", " "), False, f"{type(error).__name__}: {error}")
        if not finding.passed:
            broken.append(proof)
        seconds = time.perf_counter() - began
        word = "pass" if finding.passed else "FAIL"
        print(f"{word} {number:>2} {finding.name}: {finding.seen}  [{seconds:.0f} s]", flush=True)
    company = others_cores(before, host_reading())
    if company > _COMPANY:
        print(f"other programs kept {company:.1f} processors busy meanwhile: repeat alone what failed")
    if broken or not bench.comparisons:
        print("delta is not kept, since not every proof passed")
        return len(broken)
    kept = Calibration(
        device=device_key(bench.machine.environment),
        delta=bench.delta,
        ceilings=bench.machine.ceilings_for("bfloat16" if device == "cuda" else "float32"),
        measured_at=time.time(),
        comparisons=bench.comparisons,
    )
    try:
        print(f"delta {100 * kept.delta:.2f} % and ceilings are kept in {write_calibration(kept)}")
    except OSError as error:
        print(f"delta {100 * kept.delta:.2f} % could not be kept ({error}): set ATTN_EXP_STATE to a folder of yours")
    return len(broken)


if __name__ == "__main__":
    try:
        sys.exit(1 if run(sys.argv[1]) else 0)
    except KeyboardInterrupt:
        sys.exit(130)
