"""Measure an entry of the corpus in this process, on a machine that many entries share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from fakes import make_request

from attn_exp.core.case.case import DTYPE_BYTES
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure, measure_case
from cheats.corpus import Entry
from cheats.ways import restore

# No limit is to catch a cheat by accident: how fast nothing is depends on the CPU.
_BOUNDLESS = 1e18
_COPY = 1e15


def shared_machine() -> Machine:
    """Return a CPU without measured limits."""
    return Machine("cpu", environment={"cpu": "fake"}, ceilings=_ceilings(_BOUNDLESS))


def _ceilings(flops: float) -> dict[str, dict[str, float]]:
    return {dtype: {"copy_bytes_per_s": _COPY, "matmul_flops_per_s": flops} for dtype in DTYPE_BYTES}


def request_of(entry: Entry, **measuring: object) -> Request:
    """Return the entry's job: two short rounds."""
    backend = {"_target_": entry.target, "name": entry.target.rpartition(".")[2].lower(), **entry.options}
    made = make_request(backend, entry.case, passes=entry.passes, determinism=entry.determinism, **measuring)
    return replace(made, compile=entry.compile)


@contextmanager
def short() -> Iterator[None]:
    """Shorten rounds, warm-up and compilation."""
    compile_ = torch.compile
    with (
        mock.patch("attn_exp.timers.loop.BLOCK_US", 2_000.0),
        mock.patch("attn_exp.timers.loop.WARM_UP_US", 1_000.0),
        # A call that does nothing would be made thousands of times to fill a millisecond.
        mock.patch("attn_exp.timers.cpu.SAMPLE_US", 50.0),
        # Dynamo and AOTAutograd as they are, without the seconds of a C++ compiler behind them.
        mock.patch("torch.compile", lambda model, options=None, **rest: compile_(model, backend="aot_eager", **rest)),
    ):
        yield


def outcome(entry: Entry, machine: Machine) -> tuple[Record, Record | None]:
    """Measure an entry and undo what it changed in this process; return its record, and an honest rival's in a duel."""
    ceilings, product = machine.ceilings, entry.ceiling_flops or _BOUNDLESS
    machine.ceilings = _ceilings(product)
    try:
        # What is said to be this machine's product stays it when it is measured again.
        with short(), mock.patch("attn_exp.worker.limits.fastest_product", return_value=product):
            if not entry.rival:
                return measure(request_of(entry), machine), None
            good = {"_target_": "cheats.ways.Plain", "name": "plain"}
            requests = [make_request(good, entry.case, passes=entry.passes), request_of(entry)]
            first, second = measure_case(requests, machine)
            return second, first
    finally:
        restore()
        machine.ceilings = ceilings
        machine.expected = None
