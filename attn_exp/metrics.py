"""Metrics: from a case and its samples to the numbers people compare, under names that stay the same."""

from attn_exp.case import Case
from attn_exp.flops import compulsory_bytes, flops, flops_sdpa_convention
from attn_exp.hardware import Peak
from attn_exp.record import PassRecord, Record, Timing
from attn_exp.stats import round_medians, summarize

# Above the datasheet's rate by more than rounding of the datasheet itself.
IMPLAUSIBLE_FACTOR = 1.02
# Timers that do not measure the work: no rate follows from their times.
ISSUE_ONLY = ("dispatch",)
_RATES = ("tflops", "gb_per_s", "flops_of_", "bandwidth_of_")


def pass_metrics(
    case: Case,
    direction: str,
    measured: PassRecord,
    *,
    saves_lse: bool,
    ceilings: dict[str, float],
    peak: Peak | None,
) -> dict[str, float]:
    """The metrics of one pass; the first timing ranks, the others are second opinions.

    Times in microseconds, rates in TFLOP/s and GB/s (10^9), shares as fractions; a metric that cannot be known is
    absent. The names are the record's and MLflow's, prefixed by the pass.
    """
    ranking, *others = measured.timings
    summary = summarize(ranking.times_us, ranking.rounds)
    seconds = summary.median_us / 1e6
    work, moved = flops(case, direction), compulsory_bytes(case, direction, saves_lse=saves_lse)
    found: dict[str, float | None] = {
        "time_us": summary.median_us,
        "time_low_us": summary.low_us,
        "time_high_us": summary.high_us,
        "time_half_width": summary.half_width,
        "time_mean_us": summary.mean_us,
        "time_min_us": summary.min_us,
        "time_p5_us": summary.p5_us,
        "time_p20_us": summary.p20_us,
        "time_p80_us": summary.p80_us,
        "time_p95_us": summary.p95_us,
        "relative_spread": summary.relative_spread,
        "samples": summary.n,
        "rounds": summary.rounds,
        "outliers": summary.outliers,
        "tflops": work / seconds / 1e12,
        "tflops_sdpa_convention": flops_sdpa_convention(case, direction) / seconds / 1e12,
        "min_bytes": moved,
        "gb_per_s": moved / seconds / 1e9,
        "flops_of_measured": _share(work / seconds, ceilings.get("matmul_flops_per_s")),
        "bandwidth_of_measured": _share(moved / seconds, ceilings.get("copy_bytes_per_s")),
        "flops_of_peak": _share(work / seconds, peak.flops.get(case.dtype) if peak else None),
        "bandwidth_of_peak": _share(moved / seconds, peak.bytes_per_s if peak else None),
        "peak_memory_bytes": measured.peak_memory_bytes,
        "first_call_s": measured.first_call_s,
    }
    for other in others:
        found[f"{other.timer}_time_us"] = summarize(other.times_us, other.rounds).median_us
    for tensor, error in measured.errors.items():
        found[f"error_{tensor}"] = error.relative
        found[f"error_{tensor}_worst_row"] = error.worst_row
        found[f"error_{tensor}_max_abs"] = error.max_abs
    if ranking.timer in ISSUE_ONLY:
        found = {name: value for name, value in found.items() if not name.startswith(_RATES)}
    return {f"{direction}/{name}": float(value) for name, value in found.items() if value is not None}


def ranking_medians(record: Record, direction: str) -> list[float]:
    """The round medians in microseconds of the timer that ranks, in the order of the rounds."""
    timing = record.passes[direction].timings[0]
    return round_medians(timing.times_us, timing.rounds)


def implausibility(case: Case, direction: str, timing: Timing, peak: Peak | None) -> str | None:
    """The sentence that says which physical limit the median passes, or None."""
    if peak is None or timing.timer in ISSUE_ONLY:
        return None
    seconds = summarize(timing.times_us, timing.rounds).median_us / 1e6
    rate, limit = flops(case, direction) / seconds, peak.flops_limit(case.dtype)
    if limit is not None and rate > limit * IMPLAUSIBLE_FACTOR:
        return f"{direction}: {rate / 1e12:,.0f} TFLOP/s is above the {peak.name}'s peak of {limit / 1e12:,.0f}"
    speed = compulsory_bytes(case, direction, saves_lse=False) / seconds
    if timing.l2 != "warm" and speed > peak.bytes_per_s * IMPLAUSIBLE_FACTOR:
        return f"{direction}: {speed / 1e12:.1f} TB/s is above the {peak.name}'s peak of {peak.bytes_per_s / 1e12:.1f}"
    return None


def _share(value: float, ceiling: float | None) -> float | None:
    return value / ceiling if ceiling else None
