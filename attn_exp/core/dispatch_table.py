"""The dispatch table: which backend is the fastest at which shape, on which machine, and from which records."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from pathlib import Path
from typing import Any, Literal

import msgspec

from attn_exp.core.case.case import INT8, Case
from attn_exp.core.case.features import FEATURES
from attn_exp.core.case.masks import NO_NUMBER, Numbered
from attn_exp.core.case.near import beyond, distance, kind_of
from attn_exp.core.errors import NOT_DECODED, UserError, brief
from attn_exp.core.files import SHORT_BYTES, read_whole, write_whole

SCHEMA = 1
# The plain file for other programs; docs/picking.md has its fields.
EXPORT_SCHEMA, EXPORT_VERSION = "attn_exp.picks", 1
# A model's use of attention, and the pass whose time decides: training runs forward and backward.
Mode = Literal["inference", "training"]
MODES: dict[Mode, str] = {"inference": "forward", "training": "step"}
_AGAIN = "attn-exp pick SWEEP out=FILE makes one"
# Octaves below which two shapes are the same.
_SAME = 0.01
# How many measured shapes decide about another one: those around it on a grid of lengths and batch sizes.
_CORNERS = 4
# The facts that times on a device depend on, besides the packages of backends.
_FACTS = {"cuda": ("gpu", "cuda", "cudnn", "driver"), "cpu": ("cpu", "cpu_threads")}
_PACKAGES = {"cuda": ("torch", "triton"), "cpu": ("torch",)}
# Large tables have some thousand buckets of about a kilobyte.
_LARGEST = 16 * SHORT_BYTES


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How many times as fast as the next best backend the pick is, with its 95 % interval."""

    over: str
    times: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A measured shape, which stands for those near it.

    Attributes:
        mode: `inference` (forward) or `training` (forward and backward).
        case: the shape, as `normalised` makes it.
        pick: the label of the backend to call.
        undecided: the labels that are too close to call, the pick among them; empty without a tie.
            The pick is that of them with the least upper bound.
        margin: the pick's lead; None if no other backend was measured.
        times_us: the measured time of each backend, in microseconds.
        halves: half of the 95 % interval of the logarithm of each time.
        timers_us: the times by the timers `device` and `event`, as far as they ran: backends may differ in the host's
            part of a call.
        records: the SHA-256 of the record files behind it, by job.
    """

    mode: Mode
    case: Case
    pick: str
    undecided: tuple[str, ...] = ()
    margin: Margin | None = None
    times_us: dict[str, float]
    halves: dict[str, float] = field(default_factory=dict)
    timers_us: dict[str, dict[str, float]] = field(default_factory=dict)
    records: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DispatchTable:
    """A dispatch table.

    Attributes:
        made_by: the command that made it.
        fingerprint: the facts that the times depend on: `device`, `gpu` or `cpu`, `torch`, `cuda`, `cudnn`, `driver`,
            and the packages of the backends.
        backends: each backend's configuration, by its label.
        buckets: the measured shapes.
    """

    made_by: str
    fingerprint: dict[str, str]
    backends: dict[str, dict[str, Any]]
    buckets: tuple[Bucket, ...]


def inexpressible(case: Case) -> str | None:
    """Return why a call of `scaled_dot_product_attention` without a mask tensor cannot be this case, or None."""
    reasons = {
        "a block around the attention": case.workload is not None,
        "fp8": case.in_codes,
        "int8 scores": case.dtype == INT8,
        **{feature.lacking: bool(getattr(case, field)) for field, feature in FEATURES.items()},
        f"mask={case.mask.typed}": isinstance(case.mask, Numbered) and not case.dense,
        "a causal mask aligned bottom-right": case.align == "bottom_right" and not (case.dense or case.square),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def normalised(case: Case) -> Case:
    """Return the case as a call of SDPA has it: causal masks are aligned top-left, and those that hide nothing gone."""
    return replace(case, causal=not case.dense, align="top_left", **NO_NUMBER)


def facts_of(device: str, environment: Mapping[str, Any], packages: Iterable[str]) -> dict[str, str]:
    """Return the fingerprint of an environment with the versions of some packages; what it does not say is `none`."""
    versions = environment.get("versions", {})
    facts = {"device": device, **{name: str(environment.get(name, "none")) for name in _FACTS[device]}}
    return facts | {name: str(versions.get(name, "none")) for name in (*_PACKAGES[device], *sorted(packages))}


def write_table(table: DispatchTable, path: Path) -> None:
    """Write a table with its schema and a hash of its content. Raises UserError if the file cannot be written."""
    content = msgspec.to_builtins(table)
    _write({"schema": SCHEMA, "sha256": _hash(content), "table": content}, path)


def write_export(table: DispatchTable, path: Path) -> None:
    """Write what other programs need of a table as plain JSON. Raises UserError if the file cannot be written."""
    kept = ("mode", "case", "pick", "undecided", "margin", "times_us", "halves", "timers_us")
    cells = [{name: one[name] for name in kept} for one in msgspec.to_builtins(table.buckets)]
    head = {"schema": EXPORT_SCHEMA, "version": EXPORT_VERSION, "made_by": table.made_by}
    _write({**head, "fingerprint": table.fingerprint, "cells": cells}, path)


def _write(whole: Mapping[str, Any], path: Path) -> None:
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another with out=FILE") from error


def read_table(path: Path) -> DispatchTable:
    """Return the table in a file.

    Raises UserError if the file cannot be read, has another schema, is no table, or was changed since it was written.
    """
    try:
        whole = msgspec.json.decode(read_whole(path, _LARGEST))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {_AGAIN}") from error
    except NOT_DECODED as error:
        raise UserError(f"{path} is not a dispatch table ({error}): {_AGAIN}") from error
    if not isinstance(whole, Mapping) or not {"schema", "sha256", "table"} <= whole.keys():
        raise UserError(f"{path} is not a dispatch table: {_AGAIN}")
    if whole["schema"] != SCHEMA:
        raise UserError(f"{path} has schema {brief(repr(whole['schema']))}, and this version reads {SCHEMA}: {_AGAIN}")
    if whole["sha256"] != _hash(whole["table"]):
        raise UserError(f"{path} was changed after it had been written, its hash does not fit: {_AGAIN}")
    try:
        return msgspec.convert(whole["table"], DispatchTable)
    except (*NOT_DECODED, UserError) as error:
        raise UserError(f"{path} is not a dispatch table ({error}): {_AGAIN}") from error


def _hash(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


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

    Another shape gets the backend that is fastest in the mean of the four nearest measured ones (core/case/near.py),
    the corners of a cell of lengths and batch sizes: what wins at one alone may be far behind a few tokens away. The
    layout of tensors counts only if the table has both.
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
        case = normalised(case if self._layout is None else replace(case, layout=self._layout))
        exact = self._exact.get((mode, case))
        if exact is not None and (label := self._of(exact)) is not None:
            return Choice(label=label, how="measured", why="this shape was measured", bucket=exact)
        near = [one for one in self._kinds[_kind(mode, case)] if self._of(one) is not None]
        if not near:
            kind = ", ".join(f"{name} {value}" for name, value in kind_of(case).items() if name in ("dtype", "mask"))
            return Choice(label=None, how="none", why=f"nothing was measured for {mode} at {kind}")
        nearest = nsmallest(_CORNERS, near, key=lambda one: distance(one.case, case))
        why = f"nearest of what was measured: {', '.join(one.case.label() for one in nearest)}"
        if outside := beyond(case, [one.case for one in near]):
            why = f"beyond all that was measured: {', '.join(outside)}"
        return Choice(label=self._mean(case, nearest), how="nearest", why=why, bucket=nearest[0], beyond=outside)

    def _mean(self, case: Case, near: Sequence[Bucket]) -> str | None:
        """Return the backend with the least time in the mean of buckets: logarithms, by the inverse squared distance.

        The first bucket's pick stands if it was not measured in the others.
        """
        pick = self._of(near[0])
        weights = [1 / max(_SAME, distance(bucket.case, case)) ** 2 for bucket in near]
        means = {
            label: sum(weight * math.log(bucket.times_us[label]) for weight, bucket in zip(weights, near, strict=True))
            for label in near[0].times_us
            if label in self._usable and all(label in bucket.times_us for bucket in near)
        }
        return min(means, key=lambda label: means[label]) if pick in means else pick

    def _of(self, bucket: Bucket) -> str | None:
        """Return the pick of a bucket, or the fastest usable backend in place of one that is not."""
        if bucket.pick in self._usable:
            return bucket.pick
        usable = {label: time for label, time in bucket.times_us.items() if label in self._usable}
        return min(usable, key=lambda label: usable[label], default=None)


def _kind(mode: Mode, case: Case) -> tuple[object, ...]:
    return mode, *kind_of(case).values()
