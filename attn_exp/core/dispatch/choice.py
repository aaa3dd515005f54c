"""The choice of a backend for a shape: the pick of its bucket, or of the nearest measured shape."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from attn_exp.core.case.case import Case
from attn_exp.core.case.near import beyond, distance, kind_of
from attn_exp.core.dispatch.table import Bucket, DispatchTable, Mode, inexpressible, normalised


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which backend to call for a shape, and why; no `label` leaves the choice to SDPA.

    `bucket` is that of the shape or the nearest one, `beyond` in which respect the shape lies beyond all measured ones.
    """

    label: str | None
    how: Literal["measured", "nearest", "none"]
    why: str
    bucket: Bucket | None = None
    beyond: tuple[str, ...] = ()


class Chooser:
    """Chooses from a table. `usable` are the labels that may be chosen: by default all.

    Another shape gets the pick of the nearest measured one (in octaves of q_len, kv_len, batch x heads, and head
    dimensions). The layout of tensors counts only if the table has both.
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
        why = f"the nearest measured shape is {nearest.case.label()}"
        return Choice(label=self._of(nearest), how="nearest", why=why, bucket=nearest)

    def is_measured(self, case: Case, mode: Mode) -> bool:
        """Return whether the table has a bucket of exactly this case."""
        return inexpressible(case) is None and (mode, self._key(case)) in self._exact

    def _key(self, case: Case) -> Case:
        return normalised(case if self._layout is None else replace(case, layout=self._layout))

    def _of(self, bucket: Bucket) -> str | None:
        """Return the pick of a bucket, or the fastest usable backend in place of one that is not."""
        if bucket.pick in self._usable:
            return bucket.pick
        usable = {label: time for label, time in bucket.times_us.items() if label in self._usable}
        return min(usable, key=lambda label: usable[label], default=None)


def _kind(mode: Mode, case: Case) -> tuple[object, ...]:
    return mode, *kind_of(case).values()
