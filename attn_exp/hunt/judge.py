"""Compute an example on the backend and compare it with the reference, as a job's first call is compared."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_exp.attention.error import Tolerance, inaccuracy
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.reference import reference
from attn_exp.attention.tolerance import measured_tolerances
from attn_exp.attention.verdict import malformed, verdict
from attn_exp.backends.base import Backend
from attn_exp.core.case.case import Case
from attn_exp.hunt.example import Example, Outcome
from attn_exp.timers.call import synchronize
from attn_exp.worker.attempt import is_poisoned, status_of

# A few numbers give an uncertain tolerance, and of thousands of examples some have one that is too strict. Examples
# that seem wrong are judged again by the widest tolerance of this many other seeds, times a factor.
_OTHER_SEEDS = 16
_FACTOR = 2.0
# Four unit roundoffs of float32. Hard values have scores of hundreds that some formulas compute without any rounding,
# while others round each product: a weight is then off by this times the score.
_OF_SCORES = 4 * 2.0**-24
# Rows, tiles and means of fewer channels have errors of any size.
_LEAST_DIM = 16
# A real error at the mask's boundary shows for other values too.
_OTHER_VALUES = 2
# Elements that a 32-bit offset reaches, and no power of two: an offset that wraps around hits other memory.
_REACH, _ODD = 1 << 31, 1_048_583


@dataclass(frozen=True)
class Judge:
    """A backend on a device, as the process that may die of it has it."""

    backend: Backend
    device: str

    def outcome(self, example: Example) -> Outcome:
        """Run an example and return what comes of it."""
        backend, device, case = self.backend, self.device, example.case
        try:
            refusal = backend.unsupported(case, device)
            if refusal is not None:
                return Outcome(status="unsupported", reason=refusal)
            with _alone(device):
                inputs = _inputs_of(example, device)
                # Before the backend runs: a backend that overwrites its inputs must not change the reference.
                try:
                    wanted = expected(case, inputs, with_gradients=example.backward)
                except ValueError as error:
                    return Outcome(status="unsupported", reason=str(error))
            if not all(tensor.isfinite().all() for tensor in wanted.tensors.values()):
                return Outcome(status="unsupported", reason="the right results are not finite")
            tensors, scales = self._computed(example, inputs)
            wrong = _malformed(inputs, tensors, scales)
            if wrong is None:
                with _alone(device):
                    found = verdict(case, inputs, wanted, tensors, scales)
                    wrong = found.wrong
                    # Numbers that are not finite need no other tolerance.
                    if wrong and all(error.relative is not None for error in found.errors.values()):
                        wrong = self._again(example, inputs, wanted, tensors, scales)
            return Outcome(status="inaccurate" if wrong else "ok", reason=wrong)
        except Exception as error:  # a backend may raise anything
            status, reason = status_of(error, backend.name)
            return Outcome(status=status, reason=reason, poisoned=is_poisoned(device))

    def _computed(self, example: Example, inputs: Inputs) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return the backend's tensors, `out` and with gradients those of the inputs, and the factors of codes."""
        calls = self.backend.prepare(example.case, inputs)
        with calls.scope():
            out = calls.forward()
            tensors = {"out": out.detach() if type(out) is torch.Tensor else out}
            if example.backward:
                tensors |= dict(zip(inputs.gradient_names, calls.backward(out)(), strict=True))
            synchronize(self.device)
        return tensors, calls.scales

    def _again(
        self,
        example: Example,
        inputs: Inputs,
        wanted: Expected,
        tensors: Mapping[str, torch.Tensor],
        scales: Mapping[str, float],
    ) -> str | None:
        """Judge once more, against float64, by the widest tolerances of other seeds.

        The mask's boundary is judged on other values too.
        """
        others = [replace(example, seed=example.seed + step, large=None) for step in range(1, _OTHER_SEEDS + 1)]
        drawn = [_inputs_of(other, self.device) for other in others]
        bounds = [measured_tolerances(example.case, own, with_gradients=example.backward) for own in drawn]
        # The rounding of a reference in float64 is nothing.
        exact = reference(example.case, inputs, with_gradients=example.backward, precision=torch.float64)
        precise = _widened(example.case, replace(wanted, tensors=wanted.tensors | exact), bounds)
        found = verdict(example.case, inputs, precise, tensors, scales)
        if found.wrong is None or inaccuracy(found.errors) is not None:
            return found.wrong
        for other, own in list(zip(others, drawn, strict=True))[:_OTHER_VALUES]:
            again, _ = self._computed(replace(other, backward=False), own)
            wants = expected(example.case, own, with_gradients=False)
            if verdict(example.case, own, wants, again, scales).wrong is None:
                return None
        return found.wrong


def _malformed(inputs: Inputs, tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> str | None:
    shapes = dict(zip(inputs.gradient_names, (tuple(leaf.shape) for leaf in inputs.leaves), strict=True))
    shapes["out"] = tuple(inputs.d_out_bhsd.shape)
    for name, tensor in tensors.items():
        wrong = malformed(name, tensor, shape=shapes[name], like=inputs.q_bhsd, scales=scales)
        if wrong is not None:
            return wrong
    return None


def _widened(case: Case, wanted: Expected, bounds: list[dict[str, Tolerance]]) -> Expected:
    """Return what is expected with the widest tolerances, times a factor, and what rounding a score may cost."""
    score = _OF_SCORES * (wanted.largest_score or 0.0)
    widest = {
        name: _widest([own, *(bound.get(name, own) for bound in bounds)], score)
        for name, own in wanted.tolerances.items()
    }
    if min(case.head_dim, case.value_dim) < _LEAST_DIM:
        widest = {name: Tolerance(one.relative, one.worst_row) for name, one in widest.items()}
    return replace(wanted, tolerances=widest)


def _widest(bounds: list[Tolerance], score: float) -> Tolerance:
    def most(field: str) -> Any:
        values = [getattr(bound, field) for bound in bounds]
        return None if None in values else _FACTOR * (max(values) + score)

    fields = ("relative", "worst_row", "own_row", "tile")
    return replace(bounds[0], **{field: most(field) for field in fields})


@contextmanager
def _alone(device: str) -> Iterator[None]:
    """Compute the reference in one thread on a CPU: for small tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _inputs_of(example: Example, device: str) -> Inputs:
    """Return an example's tensors."""
    inputs = make_inputs_of(example.inputs, example.case, device, example.seed, with_gradients=example.backward)
    if example.large is None:
        return inputs
    tensors = dict(zip("qkv", inputs.qkv, strict=True))
    tensors[example.large] = _spread(tensors[example.large])
    return replace(inputs, q_bhsd=tensors["q"], k_bhsd=tensors["k"], v_bhsd=tensors["v"])


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose batch, heads or tokens, the first of several, has its last one beyond 2^31 elements."""
    axis = next(axis for axis, size in enumerate(tensor.shape[:3]) if size > 1)
    step = _REACH // (tensor.shape[axis] - 1) + _ODD
    strides = list(tensor.stride())
    strides[axis] = step
    room = torch.empty((tensor.shape[axis] - 1) * step + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    far = room.as_strided(tensor.shape, strides)
    far.copy_(tensor.detach())
    return far.requires_grad_(tensor.requires_grad)
