"""Predict the time of shapes that were not measured: a roofline, with what records say beside it.

Times are logarithms relative to a roofline, the time that the work would take at the machine's rates. What is left
(tiles, occupancy, launch) changes smoothly with the logarithms of the sizes, and a Gaussian process interpolates it
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, 2.2 and 5.4.2). Its intervals are scaled by what
leaving out each measured case in turn shows (Vovk et al., Algorithmic Learning in a Random World, 2005: conformal).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attn_exp.core.case import INT8, LAYOUTS, Case
from attn_exp.core.flops import compulsory_bytes, flops, unmasked_pairs
from attn_exp.core.student import student_t_975

# Fewer cases say too little of how times change with sizes.
LEAST_CASES = 5
_LEVEL = 0.95
# Hyperparameters that the likelihood chooses from: how far (in octaves of a size) a residual reaches, how large it is,
# how much of it is a power law, and how much two sessions or tile sizes scatter (all but the first in logarithms).
_REACHES = (1.5, 3.0, 6.0)
_SIZES = (0.1, 0.3, 0.8)
_SLOPES = (0.03, 0.15)
_SCATTERS = (0.01, 0.04)
# What one property (a mask, a layout) counts beside octaves of sizes.
_PROPERTY = 1.5
# The share of the shortest time that is there without any work.
_LATENCY = 0.7
# Beside the likeliest hyperparameters others count down to this share of their likelihood.
_UNLIKELY = 1e-3
# Errors of few left-out cases may be small by chance; in standard deviations.
_LEAST_ERROR = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """A measured time of a case in microseconds, and half of the 95 % interval of its logarithm."""

    case: Case
    time_us: float
    half: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's rates: FLOP/s of matrix products and bytes/s of its memory."""

    flops_per_s: float
    bytes_per_s: float

    def time_us(self, case: Case, direction: str) -> float:
        """Return the time that a pass takes by the roofline, in microseconds."""
        compute = flops(case, direction) / self.flops_per_s
        return 1e6 * max(compute, compulsory_bytes(case, direction, saves_lse=False) / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time of a case in microseconds, with its 95 % interval.

    `beyond` says in which respect the case lies beyond all that was measured; empty if it does not.
    """

    time_us: float
    low_us: float
    high_us: float
    beyond: tuple[str, ...] = ()

    @property
    def half(self) -> float:
        """Half of the interval of the time's logarithm."""
        return math.log(self.high_us / self.low_us) / 2


class Predictor:
    """Predicts one pass of one backend on one machine from measured times.

    Args:
        known: measured times; several of one case are averaged.
        direction: `forward`, `backward` or `step`.
        rates: the machine's; a wrong rate only makes intervals wider.

    Raises:
        ValueError: fewer than `LEAST_CASES` cases.
    """

    def __init__(self, known: Sequence[Known], direction: str, rates: Rates) -> None:
        times: dict[Case, list[Known]] = defaultdict(list)
        for one in known:
            times[one.case].append(one)
        if len(times) < LEAST_CASES:
            raise ValueError(f"{len(times)} measured cases are too few: {LEAST_CASES} are the least")
        self.cases = tuple(times)
        self.direction, self.rates = direction, rates
        self._logs = [math.fsum(math.log(one.time_us) for one in own) / len(own) for own in times.values()]
        self._halves = [max(one.half for one in own) / math.sqrt(len(own)) for own in times.values()]
        self._latency_us = _LATENCY * math.exp(min(self._logs))

    def predict(self, case: Case) -> Prediction:
        """Return the time of a case with its interval, and in which respect that is an extrapolation."""
        mean, variance = _mixed([(one.weight, *one.at(_point(case))) for one in self._processes])
        half = self._factor * math.sqrt(variance)
        time = math.exp(self._base(case) + mean)
        return Prediction(time, time * math.exp(-half), time * math.exp(half), beyond(case, self.cases))

    def left_out(self) -> dict[Case, float]:
        """Return for each measured case how much longer it took than the others predict: the ratio's logarithm."""
        return {case: miss for case, (miss, _) in zip(self.cases, self._left_out, strict=True)}

    def _base(self, case: Case) -> float:
        return math.log(self._latency_us + self.rates.time_us(case, self.direction))

    @cached_property
    def _left_out(self) -> list[tuple[float, float]]:
        """The miss of each case that the others predict, and the variance that they give it."""
        found = []
        for at in range(len(self.cases)):
            mean, variance = _mixed([(one.weight, *one.left_out[at]) for one in self._processes])
            found.append((mean, variance))
        return found

    @cached_property
    def _processes(self) -> "list[_Process]":
        """The processes whose hyperparameters are likely, which together are the prediction."""
        import numpy as np

        targets = np.array([log - self._base(case) for log, case in zip(self._logs, self.cases, strict=True)])
        points = np.array([_point(case) for case in self.cases])
        every = [
            _Process(points, targets, np.array(self._halves), reach, size, slope, scatter)
            for reach in _REACHES
            for size in _SIZES
            for slope in _SLOPES
            for scatter in _SCATTERS
        ]
        most = max(one.likelihood for one in every)
        for one in every:
            one.weight = math.exp(one.likelihood - most)
        kept = [one for one in every if one.weight > _UNLIKELY]
        total = math.fsum(one.weight for one in kept)
        for one in kept:
            one.weight /= total
        return kept

    @cached_property
    def _factor(self) -> float:
        """Half of the interval in standard deviations."""
        errors = sorted(abs(miss) / math.sqrt(variance) for miss, variance in self._left_out)
        root = math.sqrt(math.fsum(one * one for one in errors) / len(errors))
        rank = math.ceil(_LEVEL * (len(errors) + 1))
        quantile = student_t_975(len(errors) - 1)
        return max(quantile * max(root, _LEAST_ERROR), errors[min(rank, len(errors)) - 1])


def _mixed(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return mean and variance of a mixture of (weight, mean, variance)."""
    mean = math.fsum(weight * one for weight, one, _ in parts)
    return mean, math.fsum(weight * (variance + (one - mean) ** 2) for weight, one, variance in parts)


class _Process:
    """A Gaussian process with given hyperparameters; points are `(cases, coordinates)`, halves those of intervals."""

    def __init__(
        self, points: Any, targets: Any, halves: Any, reach: float, size: float, slope: float, scatter: float
    ) -> None:
        import numpy as np

        self.weight = 1.0
        self._reach, self._size, self._slope, self._scatter = reach, size, slope, scatter
        self._points, self._centre = points, points.mean(axis=0)
        self._mean = float(targets.mean())
        matrix = self._kernel(points, points) + np.diag(scatter**2 + (halves / 2) ** 2)
        self._inverse = np.linalg.inv(matrix)
        self._solved = self._inverse @ (targets - self._mean)
        self.likelihood = float(-(targets - self._mean) @ self._solved / 2 - np.linalg.slogdet(matrix)[1] / 2)
        variances = 1 / np.diag(self._inverse)
        # What each case is off the mean that the others give it, and the variance that they give it.
        self.left_out = list(zip((self._solved * variances).tolist(), variances.tolist(), strict=True))

    def at(self, point: Sequence[float]) -> tuple[float, float]:
        """Return mean and variance at a point, that of a new measurement."""
        import numpy as np

        one = np.array([point])
        across = self._kernel(one, self._points)[0]
        variance = float(self._kernel(one, one)[0, 0] - across @ self._inverse @ across)
        return self._mean + float(across @ self._solved), max(variance, 0.0) + self._scatter**2

    def _kernel(self, one: Any, other: Any) -> Any:
        """Return Matern's covariance of order 3/2, with a constant and a power law of each size beside it."""
        import numpy as np

        apart = np.sqrt(3) * np.linalg.norm(one[:, None] - other[None], axis=2) / self._reach
        linear = (one - self._centre) @ (other - self._centre).T
        return self._size**2 * (1 + (1 + apart) * np.exp(-apart)) + self._slope**2 * linear


# The sizes whose logarithms matter. What a GPU works on side by side is batch x heads.
SIZES: dict[str, Callable[[Case], float]] = {
    "q_len": lambda case: case.q_len,
    "kv_len": lambda case: case.kv_len,
    "batch x q_heads": lambda case: case.batch * case.q_heads,
    "head_dim": lambda case: case.head_dim,
    "value_dim": lambda case: case.value_dim,
    "q_heads / kv_heads": lambda case: case.q_heads / case.kv_heads,
}


def kind_of(case: Case) -> dict[str, Any]:
    """Return the properties of a case between which nothing can be interpolated."""
    mask = "full" if case.dense else "causal" if case.causal else "packed"
    return {
        "dtype": case.dtype,
        "mask": " ".join(
            [mask, *(name for name in ("window", "prefix", "chunk") if not case.dense and getattr(case, name))]
        ),
        "sequences": "packed" if case.lengths is not None else "padded",
        "softcap": case.softcap is not None,
        "sink": case.sink,
        "alibi": case.alibi,
        "bias": case.bias,
        "workload": case.workload or "attention",
    }


def beyond(case: Case, cases: Collection[Case]) -> tuple[str, ...]:
    """Return in which respect a case lies beyond all of `cases`, as `kv_len 65536 (measured up to 16384)`."""
    said = []
    for name, get in SIZES.items():
        value, measured = get(case), {get(one) for one in cases}
        if not min(measured) <= value <= max(measured):
            limit = f"up to {max(measured):g}" if value > max(measured) else f"from {min(measured):g}"
            said.append(f"{name} {value:g} (measured {limit})")
    kinds = [kind_of(one) for one in cases]
    said += [f"{name} {value}" for name, value in kind_of(case).items() if all(one[name] != value for one in kinds)]
    return tuple(said)


def distance(one: Case, other: Case) -> float:
    """Return how far two cases of one kind are apart: octaves of their sizes, as a Euclidean distance."""
    return math.dist(_point(one), _point(other))


def _point(case: Case) -> list[float]:
    sizes = [math.log2(get(case)) for get in SIZES.values()]
    pairs = max(1, unmasked_pairs(case))
    kind = kind_of(case)
    properties = (
        case.dtype == "float16",
        case.dtype == "float32",
        case.quantised,
        case.dtype == INT8,
        kind["mask"] != "full",
        case.window is not None or case.prefix is not None or case.chunk is not None,
        case.lengths is not None,
        case.softcap is not None,
        case.layout != LAYOUTS[0],
        case.workload is not None,
    )
    return [*sizes, math.log2(pairs / (case.q_len * case.kv_len)), *(_PROPERTY * one for one in properties)]
