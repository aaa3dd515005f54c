"""Measure functions of the user's own on their own tensors, in their own process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch

from attn_exp.attention.inputs import Function, Inputs, make_inputs
from attn_exp.core.case.case import Case
from attn_exp.core.errors import first_line
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.settings import Settings
from attn_exp.worker.measure import measure_case
from attn_exp.workloads.base import Workload
from attn_exp.workloads.given import GivenFunction, GivenReference, GivenTensors, Reference, scaled


def measure_tensors(
    requests: Sequence[Request],
    functions: Sequence[Function],
    tensors: tuple[torch.Tensor, ...],
    *,
    scale: float | None,
    reference: Callable[..., torch.Tensor] | None,
) -> list[Record]:
    """Measure functions on q, k and v, several of them interleaved as in a duel, and return a record of each.

    `scale` is the factor of the scores, None for 1 / sqrt(head_dim), and `reference` the right function. Raises
    ValueError if the reference cannot be used.
    """
    request, device = requests[0], tensors[0].device
    case = request.case
    generator = torch.Generator(device).manual_seed(request.measuring.seed)
    shape = (case.batch, case.q_heads, case.q_len, case.value_dim)
    d_out = torch.randn(shape, generator=generator, device=device, dtype=tensors[0].dtype)
    q, k, v = tensors
    given = Inputs(q, k, v, d_out)
    workload: Workload = GivenTensors(given)
    if reference is not None:
        workload = _judged_by(lambda precision: reference, request, given, counted=False)
    elif scale is not None and scale != case.head_dim**-0.5:
        workload = _judged_by(scaled(case, scale), request, given, counted=True)
    backends = [GivenFunction(one.backend["name"], function) for one, function in zip(requests, functions, strict=True)]
    with _own_stream(device):
        machine = _opened(device)
        # They may have been changed since it was opened.
        machine.settings = Settings.now()
        try:
            return measure_case(requests, machine, [(backend, workload) for backend in backends])
        finally:
            machine.settings.restore()
            # They may take as much memory as the tensors.
            machine.expected, machine.values = None, {}


def draw_tensors(case: Case, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of a case on a device, drawn from a seed as a job's are."""
    return make_inputs(case, device, seed, with_gradients=False).qkv


def _judged_by(right: Reference, request: Request, given: Inputs, *, counted: bool) -> GivenReference:
    """Return the workload with a reference. Raises ValueError if that cannot be used."""
    gradients = request.measuring.with_gradients
    try:
        return GivenReference(request.case, given, right, with_gradients=gradients, counted=counted)
    except Exception as error:  # a reference may raise anything
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error


@cache
def _opened(device: torch.device) -> Machine:
    """Return the machine of a device, which measures its ceilings once in a process."""
    return Machine.open(device.type)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Run on a stream of its own, as `Machine.open` sets one, and leave the program on the one that it had."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        present = torch.cuda.current_stream()
        # Work that the program has enqueued writes the tensors, or takes time from the measured calls.
        torch.cuda.synchronize()
        # CUDA graphs cannot be captured on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream())
        try:
            yield
        finally:
            torch.cuda.synchronize()
            torch.cuda.set_stream(present)
