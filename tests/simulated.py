"""Rounds of a machine whose noise is known: what intervals cover, and how often equal things are told apart.

All is on the log scale, with a standard deviation of 1 and a true mean of 0. Used by tests/test_coverage.py and, with
more repetitions, by bench/intervals.py.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np

from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.stats.interval import Uncertainty, combined, log_half_width
from attn_exp.core.stats.multiple import worse_than_best
from attn_exp.core.stats.paired import MARGIN_FLOOR, compare_pair, paired_by_round
from attn_exp.core.stats.student import student_t_975, student_t_p
from attn_exp.core.stats.summary import medians_by_round, summarize
from attn_exp.execution.duel import BUDGET_S
from attn_exp.timers import loop
from attn_exp.timers.loop import BLOCK_US, Block, Cost, Entry, sample_turns
from attn_exp.timers.stopping import StoppingRule

KINDS = (
    "independent", "drifting", "heavy tails", "two states", "sticky states", "AR(1) 0.3", "AR(1) 0.5", "AR(1) 0.8",
    "AR(1) 0.95",
)  # fmt: skip
# The rules in use: of a sweep, and of a duel.
SWEEP = StoppingRule(**read_yaml(conf_folder() / "stopping/default.yaml"))
DUEL = replace(SWEEP, budget_s=BUDGET_S)
# Twice the standard error of a row's own deviation from what it would be at another time: two rows differ by 1 %.
ROW = math.log1p(MARGIN_FLOOR) / 1.96 / math.sqrt(2)


def draw(rng, kind, rounds, length=None):
    """`rounds` values of a session that would have `length` rounds (drifts are over the whole session)."""
    length = length or rounds
    if kind == "independent":
        return rng.normal(0, 1, rounds)
    if kind == "drifting":
        # As much as the noise from first to last, on average; either way.
        slope = rng.normal(0, 1)
        noise = rng.normal(0, math.sqrt(11 / 12), rounds)
        return noise + slope * (np.arange(rounds) - (rounds - 1) / 2) / max(1, length - 1)
    if kind == "heavy tails":
        return rng.standard_t(3, rounds) / math.sqrt(3)
    if kind == "two states":
        # In three of ten rounds slower by 2 standard deviations, with a little noise in both.
        return 2 * ((rng.random(rounds) < 0.3) - 0.3) + rng.normal(0, 0.4, rounds)
    if kind == "sticky states":
        # Each lasts 8 rounds on average.
        flips = np.cumsum(rng.random(rounds) < 1 / 8) + rng.integers(2)
        return math.sqrt(1 - 0.16) * (1 - 2 * (flips % 2)) + rng.normal(0, 0.4, rounds)
    phi = float(kind.removeprefix("AR(1) "))
    values = [rng.normal()]
    for step in rng.normal(0, math.sqrt(1 - phi * phi), rounds - 1):
        values.append(phi * values[-1] + step)
    return np.array(values)


def student(medians, about=None):
    """The 95 % half-width as it was before: Student's, of independent rounds."""
    logs = np.log(medians)
    return student_t_975(len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))


def times_us(series, sd, slower=0.0):
    return (100 * np.exp(sd * np.asarray(series) + math.log1p(slower))).tolist()


def row(series, sd, interval=log_half_width, slower=0.0):
    """The headline of a row, and its uncertainty: one call a round."""
    medians = times_us(series, sd, slower)
    if interval is student:
        return math.log(np.median(medians)), student(medians)
    found = summarize(medians, range(len(medians)))
    return math.log(found.median_us), math.log(found.high_us / found.low_us) / 2


def coverage(rng, kind, rounds, count, interval=log_half_width):
    """The share of rows whose interval contains the true mean, and its median half-width in standard deviations."""
    found = [row(draw(rng, kind, rounds), 0.01, interval) for _ in range(count)]
    covered = np.mean([abs(value - math.log(100)) <= half for value, half in found])
    return float(covered), float(np.median([half for _, half in found]) / 0.01)


def told(one, other, rounds, interval=log_half_width):
    """The p-value that a comparison gives two rows of a sweep, with the spread of rows on a GPU."""
    spread = Uncertainty(math.log1p(MARGIN_FLOOR))
    if interval is student:
        return combined([Uncertainty(one[1]), Uncertainty(other[1]), spread]).p_value(one[0] - other[0])
    doubt = combined([Uncertainty(one[1], rounds - 1), Uncertainty(other[1], rounds - 1), spread])
    return doubt.p_value(one[0] - other[0])


def table(rng, kind, rounds, sd, rivals, interval=log_half_width, slower=0.0):
    """One table of `rivals` rows, each measured at its own time, the last slower: which of them are told from the best.

    By Student's interval each row is judged alone, as it was before.
    """
    rows = []
    for index in range(rivals):
        value, half = row(draw(rng, kind, rounds), sd, interval, slower if index == rivals - 1 else 0.0)
        rows.append((value + rng.normal(0, ROW), half))
    best = min(range(rivals), key=lambda index: rows[index][0])
    others = [index for index in range(rivals) if index != best]
    p_values = [told(rows[index], rows[best], rounds, interval) for index in others]
    worse = [p <= 0.05 for p in p_values] if interval is student else worse_than_best(p_values)
    return {index for index, one in zip(others, worse, strict=True) if one}


class _Series:
    """A timer of a rival whose round `number` takes what its series says, and as long as a block does."""

    name, l2, estimates = "device", "cold", True

    def __init__(self, times, turn):
        self.times, self.turn = times, turn

    def estimate(self, call):
        return Cost(BLOCK_US)

    def block(self, call, calls):
        self.turn.now += BLOCK_US / 1e6
        return Block([self.times[self.turn.number]] * calls)


def measured(series, sd, rule, slower=0.0):
    """Measure rivals in turns by the very loop, the last one slower: their timings."""
    turn = SimpleNamespace(number=0, now=0.0)
    given = [times_us(one, sd, slower * (index > 0)) for index, one in enumerate(series)]

    def before_round(number, last):
        turn.number = number

    with mock.patch.object(loop, "time", SimpleNamespace(perf_counter=lambda: turn.now)):
        entries = [Entry(_Series(times, turn), lambda: None) for times in given]
        return sample_turns(entries, rule, before_round=before_round)


def pair_of(rng, kind, *, shared):
    """Draw two rivals' series: a round's disturbance in common with own noise of a third of it, or each its own."""
    rounds = SWEEP.max_rounds + 1
    if shared:
        common = draw(rng, kind, rounds)
        return [common + rng.normal(0, 1 / 3, rounds) for _ in range(2)]
    return [draw(rng, kind, rounds) for _ in range(2)]


def swept(rng, kind, sd, count, *, shared=False, effect=0.0):
    """Rivals of a sweep by its rule: shares of rows and of ratios whose interval covers the truth, and mean rounds."""
    rows, ratios, taken = [], [], []
    for _ in range(count):
        timings = measured(pair_of(rng, kind, shared=shared), sd, SWEEP, effect)
        for timing, slower in zip(timings, (0.0, effect), strict=True):
            found = summarize(timing.times_us, timing.rounds)
            rows.append(found.low_us <= 100 * (1 + slower) <= found.high_us)
        one, other = (medians_by_round(timing.times_us, timing.rounds) for timing in timings)
        found = paired_by_round(other, one)
        ratios.append(abs(found.log_ratio - math.log1p(effect)) <= found.half)
        taken.append(found.rounds)
    return float(np.mean(rows)), float(np.mean(ratios)), float(np.mean(taken))


def duel(rng, kind, sd, *, shared, effect=0.0, interval=log_half_width):
    """One duel by its stopping rule: the log effect, its half-width, how many rounds, and the verdict.

    By Student's interval it stops as it did before: after 7 rounds at least and 40 at most, once that is precise.
    """
    series = pair_of(rng, kind, shared=shared)
    if interval is student:
        a, b = (np.array(times_us(one, sd, more)) for one, more in zip(series, (0.0, effect), strict=True))
        ratios = (b / a).tolist()
        taken = next((n for n in range(7, 40) if student(ratios[:n]) <= DUEL.precision), 40)
        mean, half = float(np.mean(np.log(ratios[:taken]))), student(ratios[:taken])
        p = student_t_p(mean / half * student_t_975(taken - 1), taken - 1)
        verdict = "undecided"
        if p <= 0.05 and abs(mean) >= math.log1p(MARGIN_FLOOR):
            verdict = "faster" if mean > 0 else "slower"
        return mean, half, taken, verdict
    timings = measured(series, sd, DUEL, effect)
    found = compare_pair(*(medians_by_round(one.times_us, one.rounds) for one in timings), MARGIN_FLOOR)
    return math.log1p(found.effect), math.log1p(found.high) - math.log1p(found.effect), found.rounds, found.verdict


def duels(rng, kind, sd, count, *, shared, effect=0.0, interval=log_half_width):
    """Shares of `count` duels: whose interval misses the effect, called `faster`, `slower`; and the mean rounds."""
    found = [duel(rng, kind, sd, shared=shared, effect=effect, interval=interval) for _ in range(count)]
    missed = np.mean([abs(mean - math.log1p(effect)) > half for mean, half, _, _ in found])
    faster, slower = (np.mean([verdict == one for *_, verdict in found]) for one in ("faster", "slower"))
    return float(missed), float(faster), float(slower), float(np.mean([taken for _, _, taken, _ in found]))
