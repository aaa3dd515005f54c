"""A machine whose speed drifts, with rivals whose true times are known.

A session is a row of slots in time, one block of calls each. `Series` holds what the machine does in each slot, so that
the same minutes of the same machine can be spent interleaved or one rival after the other. All is on the log scale:
0.01 is 1 %. Amplitudes are those seen on the H200 (measurement.md): a call slows by 9 % from cold to the power cap, and
medians of one call spread by 0.8 to 2.2 %.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from attn_exp.core.stats.paired import abba_order

KINDS = ("white", "walk", "thermal", "throttle")


@dataclass(frozen=True)
class Series:
    """Log slow-down of the machine: `clock` a slot, shared by whoever runs then, and `noise` (slots, calls)."""

    clock: np.ndarray
    noise: np.ndarray


def draw(rng, kind, slots, *, block_sd=0.01, calls=1, call_sd=0.0):
    """A session of `slots` blocks. `block_sd` is the noise that calls of a block share, `call_sd` that of each call."""
    noise = rng.normal(0, block_sd, (slots, 1)) + rng.normal(0, call_sd, (slots, calls))
    return Series(clock(rng, kind, slots), noise)


def clock(rng, kind, slots):
    """What all blocks of a session share, as a function of the slot.

    `white`: nothing. `walk`: a random walk that ends 2 % (one standard deviation) from where it began. `thermal`: an
    exponential approach to the sustained state, up to 9 %, with a time constant of 0.1 to 1 session. `throttle`: from
    some slot on, to some later one or the end, 3 to 8 % slower. `wander`: around a long-run value, the only one of
    them beside `white` that has one, by 1 %, forgotten within a slot or two.
    """
    if kind == "white":
        return np.zeros(slots)
    if kind == "wander":
        steps, stays = rng.normal(0, 0.01, slots), math.exp(-1)
        return np.array(
            list(itertools.accumulate(steps, lambda now, step: stays * now + math.sqrt(1 - stays**2) * step))
        )
    if kind == "walk":
        return np.cumsum(rng.normal(0, 0.02 / math.sqrt(slots), slots))
    time = np.arange(slots)
    if kind == "thermal":
        return -rng.uniform(0, 0.09) * np.exp(-time / (slots * rng.uniform(0.1, 1)))
    if kind == "throttle":
        begin, end = rng.integers(0, slots), rng.integers(1, 2 * slots)
        return rng.uniform(0.03, 0.08) * ((time >= begin) & (time < max(begin, end)))
    raise ValueError(kind)


def interleaved(rivals, rounds):
    """Who runs in each slot, by `abba_order`."""
    return np.concatenate([abba_order(rivals, index) for index in range(rounds)])


def run(series, order, times_us):
    """Samples (rounds, calls) of each rival, in microseconds."""
    factors = np.exp(series.clock[:, None] + series.noise)
    return [time_us * factors[order == rival] for rival, time_us in enumerate(times_us)]


def medians(samples):
    """The medians of the rounds of each rival, as lists."""
    return [np.median(of_rival, axis=1).tolist() for of_rival in samples]
