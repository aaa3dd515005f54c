"""Roofline: what bounds a pass, from its work, its bytes, and this machine's measured ceilings."""

from dataclasses import dataclass
from typing import Literal

from attn_exp.core.record.flags import LAUNCH_BOUND
from attn_exp.core.record.record import Record

Bound = Literal["compute", "memory", "latency", "launch"]
# As a share of the roof. Nsight Compute also calls a kernel latency-bound below 60 % of both its limits.
NEAR_THE_ROOF = 0.6
# A larger share says that the ceiling was measured too low.
TRUSTED = 1.05
# The metric with a pass's measured bytes, as the profiler `ncu` names it.
MEASURED_BYTES = "dram_bytes"


@dataclass(frozen=True)
class Roof:
    """The position of a pass on the roofline.

    Attributes:
        direction: `forward` or `backward`.
        rate: the pass's FLOP/s.
        intensity: FLOP per byte: of the bytes that DRAM moved if `measured`, else of the compulsory bytes.
        compulsory: FLOP per compulsory byte.
        measured: whether `ncu` counted the bytes.
        roof: the highest FLOP/s at `intensity`.
        of_compute: `rate` as a share of the measured compute ceiling.
        of_memory: the pass's bytes/s as a share of the measured memory ceiling.
        bound: the resource that bounds the pass.
    """

    direction: str
    rate: float
    intensity: float
    compulsory: float
    measured: bool
    roof: float
    of_compute: float
    of_memory: float
    bound: Bound

    @property
    def of_roof(self) -> float:
        """Return the rate as a share of the roof at this intensity."""
        return self.rate / self.roof

    @property
    def sentence(self) -> str:
        """Return what bounds the pass, with the figures that show it."""
        if self.of_roof > TRUSTED:
            return f"{self.direction} has no share of a roof: the measured ceiling is lower than what the call reached"
        bytes_ = "counted bytes" if self.measured else "compulsory bytes"
        # Without measured bytes, extra memory traffic cannot be told from latency; profiler=ncu measures it.
        beyond = ", or there is memory traffic beyond the compulsory bytes, which profiler=ncu measures"
        more = "" if self.measured or self.bound != "latency" else beyond
        where = (
            f"{self.rate / 1e12:.4g} TFLOPS is {100 * self.of_roof:.0f} % of the roof at {self.intensity:.4g} FLOP per "
            f"byte ({bytes_}), {100 * self.of_compute:.0f} % of the measured compute ceiling and "
            f"{100 * self.of_memory:.0f} % of the measured memory ceiling"
        )
        return f"{self.direction} is bound by {self.bound}: {_WHY[self.bound]}{more}; {where}"


_WHY: dict[Bound, str] = {
    "compute": f"compute throughput is above {100 * NEAR_THE_ROOF:.0f} % of its ceiling",
    "memory": f"memory throughput is above {100 * NEAR_THE_ROOF:.0f} % of its ceiling",
    "latency": f"neither compute nor memory throughput is above {100 * NEAR_THE_ROOF:.0f} % of its ceiling, and the "
    "host keeps up: the time is lost to stalls inside kernels, too few thread blocks, or gaps between kernels",
    "launch": "issuing the call takes longer than running it",
}


@dataclass(frozen=True)
class Work:
    """The work of one call of a pass: FLOP, compulsory bytes, and its measured seconds."""

    flops: float
    least_bytes: float
    seconds: float


def work_of(record: Record, direction: str) -> Work | None:
    """Return the work of one pass from the record's metrics; None if its timer measured none."""
    time_us, rate, least = (record.metrics.get(f"{direction}/{name}") for name in ("time_us", "tflops", "min_bytes"))
    return Work(rate * time_us * 1e6, least, time_us / 1e6) if time_us and rate and least else None


def roof_of(record: Record, direction: str) -> Roof | None:
    """Return a pass's position on the roofline; None if its ceilings or work are unknown."""
    work = work_of(record, direction)
    top, speed = (record.ceilings.get(name) for name in ("matmul_flops_per_s", "copy_bytes_per_s"))
    if work is None or not top or not speed:
        return None
    profile = record.profiles.get("ncu")
    counted = max(0.0, profile.metrics.get(f"{direction}/{MEASURED_BYTES}", 0.0)) if profile else 0.0
    moved = counted or work.least_bytes
    rate, of_memory = work.flops / work.seconds, moved / work.seconds / speed
    return Roof(
        direction=direction,
        rate=rate,
        intensity=work.flops / moved,
        compulsory=work.flops / work.least_bytes,
        measured=counted > 0,
        roof=min(top, work.flops / moved * speed),
        of_compute=rate / top,
        of_memory=of_memory,
        bound=_bound(record, direction, rate / top, of_memory),
    )


def roof_metrics(record: Record) -> dict[str, float]:
    """Return the roofline figures of an ok record by name, `roofline/PASS/...`."""
    metrics: dict[str, float] = {}
    for roof in filter(None, (roof_of(record, direction) for direction in record.request.measuring.passes)):
        key = f"roofline/{roof.direction}"
        metrics |= {f"{key}/flop_per_byte": roof.compulsory, f"{key}/roof_tflops": roof.roof / 1e12}
        metrics |= {f"{key}/flop_per_dram_byte": roof.intensity} if roof.measured else {}
        metrics |= {f"{key}/of_roof": roof.of_roof, f"{key}/of_memory": roof.of_memory}
    return metrics


def _bound(record: Record, direction: str, of_compute: float, of_memory: float) -> Bound:
    """Apply the rule that docs/profiling.md states."""
    if max(of_compute, of_memory) >= NEAR_THE_ROOF:
        return "compute" if of_compute >= of_memory else "memory"
    # The record's flag may come from another pass.
    event, time = (record.metrics.get(f"{direction}/{name}") for name in ("event_time_us", "time_us"))
    slower = event is None or time is None or event > LAUNCH_BOUND * time
    return "launch" if "launch_bound" in record.flags and slower else "latency"
