"""Proofs 8 and 9: equal things are found equal, different ones different, as often as statistics promise."""

import math
import statistics
import time
from functools import partial

import torch

from attn_exp.proofs.bench import SEVEN, Bench, Finding, side_by_side
from attn_exp.timers.gpu import SLEEP_CYCLES_PER_US
from attn_exp.timers.loop import Call, StoppingRule
from attn_exp.verdict import Comparison, compare_pair, delta_from_aa

# How often each is compared: A/A, the injected difference, the one below the floor.
COMPARISONS = {"cuda": (200, 60, 40), "cpu": (40, 20, 20)}
# Until the ratio is known to half a percent: what is smaller than delta must not be called by chance.
PRECISE = StoppingRule(precision=0.005, min_rounds=7, max_rounds=40, budget_s=3.0)
INJECTED = {"cuda": (0.03, 0.003), "cpu": (0.5, 0.003)}


def equal_things_are_equal(bench: Bench) -> Finding:
    """8: A/A comparisons are told apart no more often than chance allows; gives the machine's delta."""
    count = COMPARISONS[bench.machine.device][0]
    found = [_compare(bench, bench.call, bench.call) for _ in range(count)]
    bench.delta, bench.comparisons = delta_from_aa([comparison.effect for comparison in found]), count
    by_interval = sum(comparison.low > 0 or comparison.high < 0 for comparison in found) / count
    by_rule = sum(comparison.verdict in ("faster", "slower") for comparison in found) / count
    limit_interval, limit_rule = (0.05, 0.01) if bench.machine.gpu is not None else (0.25, 0.15)
    # Two hundred draws at 5 % scatter by 1.5 %; the limit is on what they are drawn from.
    most = limit_interval + 1.64 * math.sqrt(limit_interval * (1 - limit_interval) / count)
    seen = (
        f"{count} A/A: {100 * by_interval:.1f} % false by interval (at most {100 * most:.1f}, which {count} draws at "
        f"{100 * limit_interval:.0f} % reach), "
        f"{100 * by_rule:.1f} % with the floor (limit {100 * limit_rule:.0f}), delta {100 * bench.delta:.2f} %"
    )
    return Finding("equal things are equal", by_interval <= most and by_rule <= limit_rule, seen)


def differences_are_found(bench: Bench) -> Finding:
    """9: an injected difference is found, one below the floor is never called one."""
    _, *counts = COMPARISONS[bench.machine.device]
    large, small = INJECTED[bench.machine.device]
    clearly = _slowed(bench, large)
    found = [_compare(bench, bench.call, clearly) for _ in range(counts[0])]
    slightly = _slowed(bench, small)
    called = [_compare(bench, bench.call, slightly, PRECISE) for _ in range(counts[1])]
    power = sum(comparison.verdict == "faster" for comparison in found) / len(found)
    false = sum(comparison.verdict in ("faster", "slower") for comparison in called)
    allowed = 0 if bench.machine.gpu is not None else len(called) * 15 // 100
    effect = statistics.median(comparison.effect for comparison in found)
    seen = (
        f"+{100 * large:.0f} % (seen: {100 * effect:+.2f}) found in {100 * power:.0f} % of {len(found)} (at least 95), "
        f"+{100 * small:.1f} % called a difference in {false} of {len(called)} (at most {allowed})"
    )
    return Finding("differences are found", power >= 0.95 and false <= allowed, seen)


def _compare(bench: Bench, one: Call, two: Call, rule: StoppingRule = SEVEN) -> Comparison:
    medians_one, medians_two = side_by_side(bench, one, two, rule=rule)
    return compare_pair(medians_one, medians_two, bench.delta)


def _slowed(bench: Bench, share: float) -> Call:
    """The bench's call with so much more to do."""
    if bench.machine.gpu is not None:

        def with_sleep(cycles: int) -> None:
            bench.call()
            torch.cuda._sleep(cycles)

        # The launch of a second kernel takes time of its own, which is part of what is added.
        alone, launched = side_by_side(bench, bench.call, partial(with_sleep, 1))
        overhead_us = statistics.median(launched) - statistics.median(alone)
        return partial(with_sleep, max(1, int((share * bench.call_us - overhead_us) * SLEEP_CYCLES_PER_US)))

    def with_spin() -> None:
        bench.call()
        until = time.perf_counter() + share * bench.call_us / 1e6
        while time.perf_counter() < until:
            pass

    return with_spin
