"""Metrics: from a case and its samples to the numbers people compare, under names that stay the same."""

from attn_exp.core.case import Case
from attn_exp.core.flops import compulsory_bytes, flops, flops_sdpa_convention
from attn_exp.core.hardware import Peak
from attn_exp.core.record import PassRecord, Record, Timing, Work
from attn_exp.core.stats import round_medians, summarize

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
    seconds, alone = summary.median_us / 1e6, measured.work is None
    work = measured.work or attention_work(case, direction, saves_lse=saves_lse)
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
        "tflops": work.flops / seconds / 1e12,
        "tflops_sdpa_convention": flops_sdpa_convention(case, direction) / seconds / 1e12 if alone else None,
        "flops": None if alone else work.flops,
        "attention_flops": None if alone else work.attention_flops,
        "min_bytes": work.bytes,
        "gb_per_s": work.bytes / seconds / 1e9,
        "flops_of_measured": _share(work.flops / seconds, ceilings.get("matmul_flops_per_s")),
        "bandwidth_of_measured": _share(work.bytes / seconds, ceilings.get("copy_bytes_per_s")),
        "flops_of_peak": _share(work.flops / seconds, peak.flops.get(case.dtype) if peak else None),
        "bandwidth_of_peak": _share(work.bytes / seconds, peak.bytes_per_s if peak else None),
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


def attention_work(case: Case, direction: str, *, saves_lse: bool) -> Work:
    """What one pass of the attention alone does."""
    count = flops(case, direction)
    return Work(flops=count, attention_flops=count, bytes=compulsory_bytes(case, direction, saves_lse=saves_lse))


def implausibility(
    case: Case, direction: str, timing: Timing, peak: Peak | None, work: Work | None = None
) -> str | None:
    """The sentence that says which physical limit the median passes, or None. `work` is a block's."""
    if peak is None or timing.timer in ISSUE_ONLY:
        return None
    seconds = summarize(timing.times_us, timing.rounds).median_us / 1e6
    work = work or attention_work(case, direction, saves_lse=False)
    rate, limit = work.flops / seconds, peak.flops_limit(case.dtype)
    if limit is not None and rate > limit * IMPLAUSIBLE_FACTOR:
        return f"{direction}: {rate / 1e12:,.0f} TFLOP/s is above the {peak.name}'s peak of {limit / 1e12:,.0f}"
    speed = work.bytes / seconds
    if timing.l2 != "warm" and speed > peak.bytes_per_s * IMPLAUSIBLE_FACTOR:
        return f"{direction}: {speed / 1e12:.1f} TB/s is above the {peak.name}'s peak of {peak.bytes_per_s / 1e12:.1f}"
    return None


def _share(value: float, ceiling: float | None) -> float | None:
    return value / ceiling if ceiling else None
