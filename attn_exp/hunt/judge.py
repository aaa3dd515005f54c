"""Compute an example on the backend and compare it with the reference, as a job's first call is compared."""

from dataclasses import dataclass, replace

import torch

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.mask_edges import edge_error
from attn_exp.attention.tolerance import Expected, Tolerance, expected, tolerances
from attn_exp.backends.base import Backend, Calls
from attn_exp.core.hunting import Example, Outcome
from attn_exp.core.record import TensorError
from attn_exp.hunt.values import Part, inputs_of, judged_parts
from attn_exp.timers.sync import synchronize
from attn_exp.worker.attempt import error_summary, status_of

# A few numbers give an uncertain tolerance, and thousands of examples find the one that is too strict: what seems wrong
# is judged again by the widest tolerance of this many other seeds.
_OTHER_SEEDS = 16
# What seems wrong at the mask's boundary is so for other values too.
_OTHER_VALUES = 2


@dataclass(frozen=True)
class Judge:
    """A backend on a device, as the process that may die of it has it."""

    backend: Backend
    device: str

    def outcome(self, example: Example) -> Outcome:
        """Run an example and return what comes of it."""
        backend, device = self.backend, self.device
        try:
            refusal = backend.unsupported(example.case, device)
            if refusal is not None:
                return Outcome(status="unsupported", reason=refusal)
            inputs = inputs_of(example, device)
            parts = judged_parts(example, inputs)
            # Before the backend runs: a backend that overwrites its inputs must not change the reference.
            wanted = [expected(part.case, part.inputs, with_gradients=example.backward) for part in parts]
            tensors, scales = computed(backend, example, inputs, device)
            outcome = judged(parts, wanted, tensors, scales)
            certain = outcome.status == "ok" or (outcome.off is None and outcome.tensor != "edge")
            return outcome if certain else _again(self, example, parts, wanted, tensors, scales)
        except Exception as error:  # a backend may raise anything
            return _raised(backend, error, device)


def computed(
    backend: Backend, example: Example, inputs: Inputs, device: str
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the backend's tensors, `out` and with gradients `dq`, `dk`, `dv`, and the factors of codes."""
    calls: Calls = backend.prepare(example.case, inputs)
    with calls.scope():
        out = calls.forward()
        tensors = {"out": out.detach()}
        if example.backward:
            tensors |= dict(zip(("dq", "dk", "dv"), calls.backward(out)(), strict=True))
        synchronize(device)
    return tensors, calls.scales


def judged(
    parts: list[Part],
    wanted: list[Expected],
    tensors: dict[str, torch.Tensor],
    scales: dict[str, float],
) -> Outcome:
    """Compare the tensors with what is expected of each judged part."""
    for part, expects in zip(parts, wanted, strict=True):
        for name, tensor in tensors.items():
            if tensor.shape != part.whole[name]:
                reason = f"{name} has the shape {tuple(tensor.shape)}, not {tuple(part.whole[name])}"
                return Outcome(status="inaccurate", reason=reason)
            error = expects.judge(name, part.of(name, tensor), scales.get(name, 1.0))
            wrong = inaccuracy({name: error})
            if wrong is not None:
                return _wrong(name, error, part, f"{wrong}{part.where}")
        wrong = edge_error(part.case, part.inputs, part.of("out", tensors["out"]))
        if wrong is not None:
            return Outcome(status="inaccurate", reason=f"{wrong}{part.where}", tensor="edge", place=part.place)
    return Outcome(status="ok")


def _wrong(name: str, error: TensorError, part: Part, reason: str) -> Outcome:
    whole = error.relative is None or error.tolerance is None or error.relative > error.tolerance
    off, allowed = (error.relative, error.tolerance) if whole else (error.worst_row, error.row_tolerance)
    return Outcome(
        status="inaccurate", reason=reason, tensor=name, row=not whole, off=off, allowed=allowed, place=part.place
    )


def _again(
    judge: Judge,
    example: Example,
    parts: list[Part],
    wanted: list[Expected],
    tensors: dict[str, torch.Tensor],
    scales: dict[str, float],
) -> Outcome:
    """Judge once more, by the widest tolerances of other seeds, and the mask's boundary by other values too."""
    backend, device = judge.backend, judge.device
    if not example.large:
        others = [replace(example, seed=example.seed + step) for step in range(1, _OTHER_SEEDS + 1)]
        drawn = [inputs_of(other, device) for other in others]
        bounds = [tolerances(example.case, inputs, with_gradients=example.backward) for inputs in drawn]
        wanted = [_widened(wanted[0], bounds)]
    outcome = judged(parts, wanted, tensors, scales)
    if outcome.tensor != "edge" or example.large:
        return outcome
    for other, inputs in list(zip(others, drawn, strict=True))[:_OTHER_VALUES]:
        again, _ = computed(backend, replace(other, backward=False), inputs, device)
        if edge_error(example.case, inputs, again["out"]) is None:
            return Outcome(status="ok")
    return outcome


def _widened(wanted: Expected, bounds: list[dict[str, Tolerance]]) -> Expected:
    widest = {
        name: Tolerance(
            max(own.relative, *(one[name].relative for one in bounds)),
            max(own.worst_row, *(one[name].worst_row for one in bounds)),
        )
        for name, own in wanted.tolerances.items()
    }
    return Expected(wanted.tensors, widest)


def _raised(backend: Backend, error: Exception, device: str) -> Outcome:
    status, reason = status_of(error, backend.name)
    poisoned = False
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            poisoned = True
    return Outcome(status=status, reason=reason or error_summary(error), poisoned=poisoned)
