"""Metrics: the numbers people compare, computed from a timed pass. Each is one function decorated with `metric`.

A function here is all that a metric needs: it appears in records, `table.csv`, MLflow and comparisons under its name,
and its docstring is its row in docs/metrics.md.
"""

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import compulsory_bytes, flops, flops_sdpa_convention
from attn_exp.core.host.hardware import Peak
from attn_exp.core.record.checked import OF_THE_BATCH, holds
from attn_exp.core.record.record import CompileRecord, PassRecord, Record, Work
from attn_exp.core.record.window import Window
from attn_exp.core.stats.summary import Summary, medians_by_round, summarize

# Timers that do not measure the work: no rate follows from their times.
ISSUE_ONLY = ("dispatch",)
# The call has to take this share of the time in which the power was measured: else it is not the call's power.
CALL_SHARE = 0.5


@dataclass(frozen=True)
class TimedPass:
    """One pass that was timed: what metrics are computed from. The first timing ranks, the others are second opinions.

    `ceilings` are rates measured on this machine, `peak` those of the datasheet, None if it is not known. `compiled` is
    what Dynamo did in the job, None if nothing was compiled.
    """

    case: Case
    direction: str
    measured: PassRecord
    work: Work
    ceilings: Mapping[str, float] = field(default_factory=dict)
    peak: Peak | None = None
    compiled: CompileRecord | None = None

    @cached_property
    def summary(self) -> Summary:
        """The summary of the ranking timer's samples."""
        timing = self.measured.timings[0]
        return summarize(timing.times_us, timing.rounds)

    @property
    def seconds(self) -> float:
        """The median time in seconds."""
        return self.summary.median_us / 1e6

    @property
    def window(self) -> Window:
        """What the device did while the pass was timed; one without readings of records that have none."""
        return self.measured.window or Window()

    @property
    def power_w(self) -> float | None:
        """The mean power in watts, None if it is mostly that of other things than the call."""
        issued = self.measured.timings[0].timer in ISSUE_ONLY
        return None if issued or self.window.call_share < CALL_SHARE else self.window.power_w


# The unit of facts: 1 is yes, 0 is no.
YES_OR_NO = "yes or no"
Value = float | Mapping[str, float | None] | None


@dataclass(frozen=True)
class Metric:
    """One metric, or with a placeholder in its name (`error_{tensor}`) one for each value that `compute` returns.

    `rate` marks work over the median time, or a share of such a rate: a higher one is better, it has the time's
    confidence interval, and there is none where the timer does not time the work. `follows_clock` says whether a
    machine that is slower today moves it, `of_power` whether it is as uncertain as the power. `head` is its column's
    header in tables, `parts` are the values of the placeholder whose columns `table.csv` has even if they are empty.
    """

    name: str
    unit: str
    description: str
    compute: Callable[[TimedPass], Value]
    higher_is_better: bool = False
    rate: bool = False
    follows_clock: bool = False
    of_power: bool = False
    head: str = ""
    parts: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names that have a column in every `table.csv`; other names of a family have one if a record has them."""
        return tuple(named(self.name, part) for part in self.parts) if "{" in self.name else (self.name,)

    @property
    def has_time_interval(self) -> bool:
        """Whether the median time's confidence interval, as a relative one, is this metric's too."""
        return self.rate or self.name in ("time_us", "joules_per_call")

    @property
    def is_fact(self) -> bool:
        """Whether tables show yes and no in place of its numbers."""
        return self.unit == YES_OR_NO


def named(name: str, part: str) -> str:
    """Return the name of a family (`error_{tensor}`) with its placeholder filled: `error_dq`."""
    return re.sub(r"\{\w+\}", part, name)


METRICS: dict[str, Metric] = {}
_FOLLOW_CLOCK = ("us", "TFLOP/s", "GB/s")


def metric(
    unit: str,
    *,
    name: str = "",
    rate: bool = False,
    higher_is_better: bool | None = None,
    follows_clock: bool | None = None,
    of_power: bool = False,
    head: str = "",
    parts: tuple[str, ...] = (),
) -> Callable[[Callable[[TimedPass], Value]], Callable[[TimedPass], Value]]:
    """Register a function as the metric of its name, or of `name`; its docstring's first line describes the metric.

    Unless given, `higher_is_better` is what `rate` is, and `follows_clock` is true of times in microseconds and rates.
    """

    def register(compute: Callable[[TimedPass], Value]) -> Callable[[TimedPass], Value]:
        full_name = name or compute.__name__
        METRICS[full_name] = Metric(
            name=full_name,
            unit=unit,
            description=(compute.__doc__ or "").partition("\n")[0].rstrip("."),
            compute=compute,
            higher_is_better=rate if higher_is_better is None else higher_is_better,
            rate=rate,
            follows_clock=unit in _FOLLOW_CLOCK if follows_clock is None else follows_clock,
            of_power=of_power,
            head=head or full_name.replace("_", " "),
            parts=parts,
        )
        metric_named.cache_clear()
        return compute

    return register


@lru_cache(1 << 12)
def metric_named(name: str) -> Metric:
    """Return the metric of a name without its pass; one that this version does not know is taken to be better low."""
    if name in METRICS:
        return METRICS[name]
    # The longest first: `error_out_worst_row` is of `error_{tensor}_worst_row`, not of `error_{tensor}`.
    for family in sorted(METRICS, key=len, reverse=True):
        head, placeholder, tail = re.split(r"(\{\w+\})", family) if "{" in family else (family, "", "")
        if placeholder and len(name) > len(head + tail) and name.startswith(head) and name.endswith(tail):
            part = name[len(head) : len(name) - len(tail)]
            return replace(METRICS[family], head=METRICS[family].head.replace(placeholder, part))
    return Metric(name, "", "", lambda timed: None, follows_clock=name.endswith("_us"), head=name.replace("_", " "))


def pass_metrics(
    case: Case,
    direction: str,
    measured: PassRecord,
    *,
    saves_lse: bool,
    ceilings: Mapping[str, float],
    peak: Peak | None,
    compiled: CompileRecord | None = None,
) -> dict[str, float]:
    """Return the metrics of one pass under the record's names, which begin with the pass; unknown ones are absent."""
    work = measured.work or attention_work(case, direction, saves_lse=saves_lse)
    timed = TimedPass(case, direction, measured, work, ceilings, peak, compiled)
    issue_only = measured.timings[0].timer in ISSUE_ONLY
    values: dict[str, float | None] = {}
    for name, entry in METRICS.items():
        if entry.rate and issue_only:
            continue
        value = entry.compute(timed)
        if isinstance(value, Mapping):
            values |= {named(name, part): figure for part, figure in value.items()}
        else:
            values[name] = value
    return {f"{direction}/{name}": float(value) for name, value in values.items() if value is not None}


@metric("us", head="us")
def time_us(timed: TimedPass) -> Value:
    """Median of all samples by the primary timer."""
    return timed.summary.median_us


@metric("us")
def time_low_us(timed: TimedPass) -> Value:
    """Lower bound of the median's 95 % confidence interval across rounds."""
    return timed.summary.low_us


@metric("us")
def time_high_us(timed: TimedPass) -> Value:
    """Upper bound of the median's 95 % confidence interval across rounds."""
    return timed.summary.high_us


@metric("share")
def time_half_width(timed: TimedPass) -> Value:
    """Relative half-width of that confidence interval: 0.01 is ±1 %."""
    return timed.summary.half_width


@metric("us")
def time_mean_us(timed: TimedPass) -> Value:
    """Mean of all samples."""
    return timed.summary.mean_us


@metric("us")
def time_min_us(timed: TimedPass) -> Value:
    """Smallest sample."""
    return timed.summary.min_us


@metric("us")
def time_p5_us(timed: TimedPass) -> Value:
    """5th percentile of the samples."""
    return timed.summary.p5_us


@metric("us")
def time_p20_us(timed: TimedPass) -> Value:
    """20th percentile of the samples."""
    return timed.summary.p20_us


@metric("us")
def time_p80_us(timed: TimedPass) -> Value:
    """80th percentile of the samples."""
    return timed.summary.p80_us


@metric("us")
def time_p95_us(timed: TimedPass) -> Value:
    """95th percentile of the samples."""
    return timed.summary.p95_us


@metric("share")
def relative_spread(timed: TimedPass) -> Value:
    """(p80 - p20) / median."""
    return timed.summary.relative_spread


@metric("count")
def samples(timed: TimedPass) -> Value:
    """Number of samples."""
    return timed.summary.n


@metric("count")
def rounds(timed: TimedPass) -> Value:
    """Number of rounds."""
    return timed.summary.rounds


@metric("count")
def effective_rounds(timed: TimedPass) -> Value:
    """Number of independent rounds that would determine the mean as well as these, which depend on each other."""
    return timed.summary.effective_rounds


@metric("share")
def round_autocorrelation(timed: TimedPass) -> Value:
    """Autocorrelation of the rounds' log medians at lag 1."""
    return timed.summary.autocorrelation


@metric("count")
def outliers(timed: TimedPass) -> Value:
    """Number of samples beyond 3 interquartile ranges; none is dropped."""
    return timed.summary.outliers


@metric("TFLOP/s", rate=True, head="TFLOPS")
def tflops(timed: TimedPass) -> Value:
    """Matrix products of the P unmasked pairs: fwd 2 Hq P (d_qk + d_v), bwd 2 Hq P (3 d_qk + 2 d_v), step both."""
    return timed.work.flops / timed.seconds / 1e12 or None


@metric("TFLOP/s", rate=True)
def tflops_sdpa_convention(timed: TimedPass) -> Value:
    """As PyTorch's benchmark counts: 4 M N D + 2 M N, half if causal; 2.5 times that for a backward, 3.5 for a step."""
    if timed.measured.work is not None:
        return None
    return flops_sdpa_convention(timed.case, timed.direction) / timed.seconds / 1e12


@metric("FLOP", name="flops")
def block_flops(timed: TimedPass) -> Value:
    """Work of a [block](workloads.md), its attention included; blocks only."""
    return (timed.work.flops or None) if timed.measured.work is not None else None


@metric("FLOP")
def attention_flops(timed: TimedPass) -> Value:
    """Work of the attention in a [block](workloads.md); blocks only."""
    return (timed.work.attention_flops or None) if timed.measured.work is not None else None


@metric("us")
def us_per_token(timed: TimedPass) -> Value:
    """The median over the queries of the call: what decoding takes for a token."""
    return timed.summary.median_us / (timed.case.batch * timed.case.q_len)


@metric("byte")
def min_bytes(timed: TimedPass) -> Value:
    """Compulsory bytes: every input read once, every output written once."""
    return timed.work.bytes


@metric("byte")
def min_bytes_of_requests(timed: TimedPass) -> Value:
    """The same if each request reads the pages that it [shares](cases.md#paged-caches); absent if none are shared."""
    if not timed.case.shared_keys:
        return None
    case = replace(timed.case, pages="shuffled")
    return compulsory_bytes(case, timed.direction, saves_lse=False)


@metric("GB/s", rate=True, head="GB/s")
def gb_per_s(timed: TimedPass) -> Value:
    """Rate of the compulsory bytes."""
    return timed.work.bytes / timed.seconds / 1e9


@metric("share", rate=True)
def flops_of_measured(timed: TimedPass) -> Value:
    """`tflops` relative to the matrix product that the same worker measured."""
    return _share(timed.work.flops / timed.seconds, timed.ceilings.get("matmul_flops_per_s"))


@metric("share", rate=True)
def bandwidth_of_measured(timed: TimedPass) -> Value:
    """`gb_per_s` relative to the copy that the same worker measured."""
    return _share(timed.work.bytes / timed.seconds, timed.ceilings.get("copy_bytes_per_s"))


@metric("share", rate=True, follows_clock=True)
def flops_of_peak(timed: TimedPass) -> Value:
    """`tflops` relative to the datasheet."""
    return _share(timed.work.flops / timed.seconds, timed.peak.flops.get(timed.case.dtype) if timed.peak else None)


@metric("share", rate=True, follows_clock=True)
def bandwidth_of_peak(timed: TimedPass) -> Value:
    """`gb_per_s` relative to the datasheet."""
    return _share(timed.work.bytes / timed.seconds, timed.peak.bytes_per_s if timed.peak else None)


@metric("J", of_power=True)
def joules_per_call(timed: TimedPass) -> Value:
    """Energy of a call: [mean power](measuring.md#energy) while the pass was timed, times the median time."""
    return None if timed.power_w is None else timed.power_w * timed.seconds


@metric("TFLOP/s/W", rate=True, of_power=True, head="TFLOPS/W")
def tflops_per_watt(timed: TimedPass) -> Value:
    """`tflops` relative to the mean power, the same as TFLOP per joule."""
    return None if not timed.power_w else timed.work.flops / timed.seconds / 1e12 / timed.power_w or None


@metric("W", of_power=True)
def power_w(timed: TimedPass) -> Value:
    """Mean power while the pass was timed, flushes and gaps between the calls included."""
    return timed.window.power_w


@metric("share")
def power_error(timed: TimedPass) -> Value:
    """Largest relative error of that power that the steps of its counter allow."""
    return timed.window.power_error


@metric("MHz", higher_is_better=True)
def clock_mhz(timed: TimedPass) -> Value:
    """Median clock of the SMs in the blocks, by stamps on the GPU, else as NVML reads it; of a CPU's cores as Linux."""
    clocks = timed.measured.timings[0].clocks_mhz
    return statistics.median(clocks) if clocks else timed.window.clock_mhz


@metric("MHz", higher_is_better=True)
def memory_clock_mhz(timed: TimedPass) -> Value:
    """Median clock of the GPU's memory while the pass was timed."""
    return timed.window.memory_clock_mhz


@metric("share", higher_is_better=True)
def duty(timed: TimedPass) -> Value:
    """Least share of a stretch under load in which the GPU ran the call or its flush, with `regime=sustained`."""
    return timed.measured.timings[0].notes.get("duty")


@metric("byte")
def peak_memory_bytes(timed: TimedPass) -> Value:
    """[Memory of the call](measuring.md#memory) at its peak in PyTorch's allocator; GPU only."""
    return timed.measured.peak_memory_bytes


@metric("byte")
def outside_memory_bytes(timed: TimedPass) -> Value:
    """Device memory that the backend took and PyTorch's allocator does not know, by the driver's count; GPU only."""
    return timed.measured.outside_memory_bytes


@metric("byte")
def workspace_bytes(timed: TimedPass) -> Value:
    """What a call allocates beside its results, and the workspace that its backend names; on a CPU the latter alone."""
    return timed.measured.workspace_bytes


@metric("us")
def mask_build_us(timed: TimedPass) -> Value:
    """Time to [build the mask](cases.md#building-a-mask) of a backend whose masks are data; not a part of the call."""
    return timed.measured.mask_build_us


@metric("share")
def mask_build_of_call(timed: TimedPass) -> Value:
    """`mask_build_us` relative to the median time: 2 is a mask that takes as long as two calls."""
    built_us = timed.measured.mask_build_us
    return None if built_us is None else built_us / timed.summary.median_us


@metric("byte")
def mask_build_bytes(timed: TimedPass) -> Value:
    """Memory in PyTorch's allocator that building the mask takes at its peak; GPU only."""
    return timed.measured.mask_build_bytes


@metric(YES_OR_NO, higher_is_better=True, head="determ.")
def deterministic(timed: TimedPass) -> Value:
    """Whether 100 calls on the same inputs had [the same bits](checks.md#same-bits): 1 is yes, 0 is no."""
    return holds(timed.measured.bitwise, "calls")


@metric(YES_OR_NO, higher_is_better=True, head="batch inv.")
def batch_invariant(timed: TimedPass) -> Value:
    """Whether a row has the same bits at other positions in the batch and in batches of other sizes."""
    return holds(timed.measured.bitwise, *OF_THE_BATCH)


@metric(YES_OR_NO, higher_is_better=True, head="phase inv.")
def phase_invariant(timed: TimedPass) -> Value:
    """Whether the last query, and the last chunk of queries, have the same bits alone as among all queries."""
    return holds(timed.measured.bitwise, "phases")


@metric(YES_OR_NO, head="reads free")
def reads_free_slots(timed: TimedPass) -> Value:
    """Whether a NaN in [memory without a key](checks.md#free-slots) reaches the output: 1 is yes, 0 is no."""
    reads = timed.measured.reads_free_slots
    return None if reads is None else float(reads)


@metric("s")
def first_call_s(timed: TimedPass) -> Value:
    """The first call: building, compiling, loading."""
    return timed.measured.first_call_s


@metric("count")
def graphs(timed: TimedPass) -> Value:
    """Graphs that Dynamo made of the job, all passes together; only with torch.compile."""
    return None if timed.compiled is None else timed.compiled.graphs


@metric("count")
def graph_breaks(timed: TimedPass) -> Value:
    """Breaks between those graphs; the record and `attn-exp explain` have their reasons."""
    return None if timed.compiled is None else sum(timed.compiled.breaks.values())


@metric("count")
def recompilations(timed: TimedPass) -> Value:
    """How often Dynamo compiled a frame of the job again."""
    return None if timed.compiled is None else timed.compiled.recompilations


@metric("us", name="{timer}_time_us", parts=("kernel", "event"))
def secondary_time_us(timed: TimedPass) -> Value:
    """Median by each secondary timer that ran: `kernel_time_us`, `event_time_us`, `device_time_us`."""
    return {timing.timer: summarize(timing.times_us, timing.rounds).median_us for timing in timed.measured.timings[1:]}


@metric("share")
def launch_share(timed: TimedPass) -> Value:
    """Share of `event_time_us` that is not `time_us`: launches by the host, which a CUDA graph avoids."""
    ranking, *secondary = timed.measured.timings
    events = [timing for timing in secondary if timing.timer == "event"]
    if ranking.timer != "device" or not events:
        return None
    device, event = (summarize(timing.times_us, timing.rounds).median_us for timing in (ranking, events[0]))
    return max(0.0, 1 - device / event)


@metric("share", name="error_{tensor}", parts=("out", "dq", "dk", "dv", "d_sink", "dx"))
def error(timed: TimedPass) -> Value:
    """[Error](checks.md) relative to the reference's norm: out, dq, dk, dv, d_sink; of a block also dx, d_NAME."""
    return {tensor: figure.relative for tensor, figure in timed.measured.errors.items()}


@metric("share", name="error_{tensor}_worst_row")
def error_worst_row(timed: TimedPass) -> Value:
    """The same for the worst row along the last dimension."""
    return {tensor: figure.worst_row for tensor, figure in timed.measured.errors.items()}


@metric("value", name="error_{tensor}_max_abs")
def error_max_abs(timed: TimedPass) -> Value:
    """Largest absolute difference."""
    return {tensor: figure.max_abs for tensor, figure in timed.measured.errors.items()}


@metric("ULP", name="error_{tensor}_ulp")
def error_ulp(timed: TimedPass) -> Value:
    """Root mean square of the error in [units in the last place](numerics.md), with `gold=float64`."""
    return {tensor: figure.ulps.rms for tensor, figure in timed.measured.errors.items() if figure.ulps}


@metric("ULP", name="error_{tensor}_ulp_mean")
def error_ulp_mean(timed: TimedPass) -> Value:
    """Mean of the same: positive where numbers are too far from zero."""
    return {tensor: figure.ulps.mean for tensor, figure in timed.measured.errors.items() if figure.ulps}


def ranking_medians(record: Record, direction: str) -> dict[int, float]:
    """Return the medians in microseconds of the timer that ranks, by the numbers of the rounds."""
    timing = record.passes[direction].timings[0]
    return medians_by_round(timing.times_us, timing.rounds)


def attention_work(case: Case, direction: str, *, saves_lse: bool) -> Work:
    """Return the work of one pass of the attention without a block around it."""
    count = flops(case, direction)
    return Work(flops=count, attention_flops=count, bytes=compulsory_bytes(case, direction, saves_lse=saves_lse))


def _share(value: float, ceiling: float | None) -> float | None:
    return (value / ceiling or None) if ceiling else None
