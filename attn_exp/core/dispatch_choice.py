"""The choice of a backend for a shape: the pick of its bucket, or what the measured shapes near it predict."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from attn_exp.core.case import Case
from attn_exp.core.dispatch_table import MODES, Bucket, DispatchTable, Mode, inexpressible, normalised
from attn_exp.core.prediction import LEAST_CASES, Known, Prediction, Predictor, Rates, beyond, distance, kind_of


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which backend to call for a shape, and why.

    Attributes:
        label: the backend's label in the table; None leaves the choice to SDPA.
        how: `measured`, `predicted` from the measured shapes, of the `nearest` one, or `none`.
        why: one sentence.
        bucket: the bucket of the shape, or the nearest one.
        times: the predicted time of each backend that the nearest bucket has; empty unless `predicted`.
        beyond: in which respect the shape lies beyond all measured ones.
    """

    label: str | None
    how: Literal["measured", "predicted", "nearest", "none"]
    why: str
    bucket: Bucket | None = None
    times: dict[str, Prediction] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()


class Chooser:
    """Chooses from a table. `usable` are the labels that may be chosen: by default all.

    A shape between measured ones gets the backend with the least predicted time, of those that computed the nearest
    shape (in octaves of q_len, kv_len, batch x heads, and head dimensions). One beyond all measured shapes gets the
    pick of the nearest. The layout of tensors counts only if the table has both.
    """

    def __init__(self, table: DispatchTable, usable: Collection[str] | None = None) -> None:
        self._table = table
        self._usable = set(table.backends if usable is None else usable)
        self._exact = {(bucket.mode, bucket.case): bucket for bucket in table.buckets}
        self._kinds: dict[tuple[object, ...], list[Bucket]] = defaultdict(list)
        for bucket in table.buckets:
            self._kinds[_kind(bucket.mode, bucket.case)].append(bucket)
        layouts = {bucket.case.layout for bucket in table.buckets}
        self._layout = layouts.pop() if len(layouts) == 1 else None
        self._predictors: dict[tuple[str, Mode, str], Predictor | None] = {}

    def choice(self, case: Case, mode: Mode) -> Choice:
        """Return the choice for a case in a mode."""
        if reason := inexpressible(case):
            return Choice(label=None, how="none", why=f"a dispatch table has no case with {reason}")
        case = self._key(case)
        exact = self._exact.get((mode, case))
        if exact is not None and (label := self._of(exact)) is not None:
            return Choice(label=label, how="measured", why="this shape was measured", bucket=exact)
        near = [one for one in self._kinds[_kind(mode, case)] if self._of(one) is not None]
        if not near:
            kind = ", ".join(f"{name} {value}" for name, value in kind_of(case).items() if name in ("dtype", "mask"))
            return Choice(label=None, how="none", why=f"nothing was measured for {mode} at {kind}")
        nearest = min(near, key=lambda one: distance(one.case, case))
        outside = beyond(case, [one.case for one in near])
        if outside:
            why = f"beyond all that was measured: {', '.join(outside)}"
            return Choice(label=self._of(nearest), how="nearest", why=why, bucket=nearest, beyond=outside)
        times = self._times(case, mode, [label for label in nearest.times_us if label in self._usable])
        if not times:
            why = f"the nearest measured shape is {nearest.case.label()}"
            return Choice(label=self._of(nearest), how="nearest", why=why, bucket=nearest)
        label = min(times, key=lambda one: times[one].time_us)
        why = "it has the least time that the measured shapes predict"
        return Choice(label=label, how="predicted", why=why, bucket=nearest, times=times)

    def is_measured(self, case: Case, mode: Mode) -> bool:
        """Return whether the table has a bucket of exactly this case."""
        return inexpressible(case) is None and (mode, self._key(case)) in self._exact

    def _key(self, case: Case) -> Case:
        return normalised(case if self._layout is None else replace(case, layout=self._layout))

    def left_out(self, mode: Mode) -> list[float]:
        """Return how many times as long as the fastest the choice takes at each shape, were that not measured.

        Of shapes that others surround, and whose backends are all predicted.
        """
        misses: dict[str, dict[Case, float]] = {}
        found = []
        for bucket in self._table.buckets:
            others = [one.case for one in self._kinds[_kind(mode, bucket.case)] if one is not bucket]
            if bucket.mode != mode or not others or beyond(bucket.case, others):
                continue
            predicted = {}
            for label, time in bucket.times_us.items():
                key = f"{label} {bucket.case.dtype}"
                predictor = self._predictor(label, mode, bucket.case.dtype)
                if key not in misses:
                    misses[key] = {} if predictor is None else predictor.left_out()
                if bucket.case in misses[key]:
                    predicted[label] = time * math.exp(-misses[key][bucket.case])
            if len(predicted) == len(bucket.times_us):
                label = min(predicted, key=lambda one: predicted[one])
                found.append(bucket.times_us[label] / min(bucket.times_us.values()))
        return found

    def _of(self, bucket: Bucket) -> str | None:
        """Return the pick of a bucket, or the fastest usable backend in place of one that is not."""
        if bucket.pick in self._usable:
            return bucket.pick
        usable = {label: time for label, time in bucket.times_us.items() if label in self._usable}
        return min(usable, key=lambda label: usable[label], default=None)

    def _times(self, case: Case, mode: Mode, labels: Iterable[str]) -> dict[str, Prediction]:
        """Return what is predicted for each backend; nothing if that is not known of all."""
        times = {}
        for label in labels:
            predictor = self._predictor(label, mode, case.dtype)
            if predictor is None:
                return {}
            times[label] = predictor.predict(case)
        return times

    def _predictor(self, label: str, mode: Mode, dtype: str) -> Predictor | None:
        key = (label, mode, dtype)
        if key not in self._predictors:
            known = [
                Known(bucket.case, bucket.times_us[label], bucket.halves.get(label, 0.0))
                for bucket in self._table.buckets
                if bucket.mode == mode and bucket.case.dtype == dtype and label in bucket.times_us
            ]
            rates = self._table.rates.get(dtype)
            enough = rates is not None and len({one.case for one in known}) >= LEAST_CASES
            self._predictors[key] = Predictor(known, MODES[mode], Rates(*rates)) if enough and rates else None
        return self._predictors[key]


def _kind(mode: Mode, case: Case) -> tuple[object, ...]:
    return mode, *kind_of(case).values()
