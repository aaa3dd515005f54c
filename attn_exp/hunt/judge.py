"""Compute an example on the backend and compare it with the reference, as a job's first call is compared."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_exp.attention.error_parts import UNIT, Tolerance
from attn_exp.attention.expected import Expected, expected
from attn_exp.attention.inputs import Inputs, unit_of
from attn_exp.attention.reference import reference
from attn_exp.attention.tolerance import measured_tolerances
from attn_exp.attention.verdict import Verdict, malformed, verdict
from attn_exp.backends.base import Backend
from attn_exp.core.case import Case
from attn_exp.core.hunting import Example, Outcome
from attn_exp.hunt.values import Part, inputs_of, judged_parts
from attn_exp.timers.sync import synchronize
from attn_exp.worker.attempt import status_of

# A few numbers give an uncertain tolerance, and of thousands of examples some have one that is too strict. What seems
# wrong is judged again by the widest tolerance of this many other seeds, times a factor.
_OTHER_SEEDS = 16
_FACTOR = 2.0
# Four unit roundoffs of float32. Hard values have scores of hundreds that some formulas compute without any rounding,
# while others round each product: a weight is then off by this times the score.
_OF_SCORES = 4 * 2.0**-24
# Rows, tiles and means of fewer channels have errors of any size.
_LEAST_DIM = 16
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
            with _alone(device):
                inputs = inputs_of(example, device)
                parts = judged_parts(example, inputs)
                # Before the backend runs: a backend that overwrites its inputs must not change the reference.
                try:
                    wanted = [expected(part.case, part.inputs, with_gradients=example.backward) for part in parts]
                except ValueError as error:
                    return Outcome(status="unsupported", reason=str(error))
            if not all(tensor.isfinite().all() for one in wanted for tensor in one.tensors.values()):
                return Outcome(status="unsupported", reason="the right results are not finite")
            tensors, scales = self._computed(example, inputs)
            wrong = _malformed(example, inputs, tensors, scales)
            if wrong is not None:
                return Outcome(status="inaccurate", reason=wrong)
            with _alone(device):
                outcome = _judged(parts, wanted, tensors, scales)
                certain = outcome.status == "ok" or (outcome.off is None and outcome.tensor != "edge")
                return outcome if certain else self._again(example, parts, wanted, tensors, scales)
        except Exception as error:  # a backend may raise anything
            status, reason = status_of(error, backend.name)
            return Outcome(status=status, reason=reason, poisoned=_poisoned(device))

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
        parts: list[Part],
        wanted: list[Expected],
        tensors: Mapping[str, torch.Tensor],
        scales: Mapping[str, float],
    ) -> Outcome:
        """Judge once more, against float64, by the widest tolerances of other seeds.

        The mask's boundary is judged on other values too.
        """
        others = [replace(example, seed=example.seed + step, large=None) for step in range(1, _OTHER_SEEDS + 1)]
        drawn = [] if example.large == "whole" else [inputs_of(other, self.device) for other in others]
        bounds = [measured_tolerances(example.case, inputs, with_gradients=example.backward) for inputs in drawn]
        precise = [
            _widened(part.case, _in_float64(part, one, with_gradients=example.backward), bounds)
            for part, one in zip(parts, wanted, strict=True)
        ]
        outcome = _judged(parts, precise, tensors, scales)
        if outcome.tensor != "edge":
            return outcome
        for other, inputs in list(zip(others, drawn, strict=False))[:_OTHER_VALUES]:
            again, _ = self._computed(replace(other, backward=False), inputs)
            wants = expected(example.case, inputs, with_gradients=False)
            if verdict(example.case, inputs, wants, again, scales).wrong is None:
                return Outcome(status="ok")
        return outcome


def _judged(
    parts: list[Part], wanted: list[Expected], tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float]
) -> Outcome:
    """Compare the tensors with what is expected of each judged part."""
    for part, expects in zip(parts, wanted, strict=True):
        own = {name: part.of(name, tensor) for name, tensor in tensors.items()}
        found = verdict(part.case, part.inputs, expects, own, scales)
        if found.wrong is not None:
            return _wrong(found, expects, part)
    return Outcome(status="ok")


def _wrong(found: Verdict, expects: Expected, part: Part) -> Outcome:
    """Return the outcome of a verdict: the first tensor with an error that is too large, else the mask's boundary."""
    reason = f"{found.wrong}{part.where}"
    for name, error in found.errors.items():
        for field, (allowed, sign) in _BOUNDS.items():
            off, most = getattr(error, field), getattr(error, allowed)
            finite = error.relative is not None
            if finite and (off is None or most is None or sign * off <= sign * most):
                continue
            unit = expects.units.get(name, UNIT)
            return Outcome(
                status="inaccurate", reason=reason, tensor=name, error=field, off=off, allowed=most, place=part.place,
                least_norm=1.0 if field == "worst_row" else expects.tolerances[name].small,
                vanishing=(unit.least, unit.scale),
            )  # fmt: skip
    return Outcome(status="inaccurate", reason=reason, tensor="edge", place=part.place)


# The bound on each error, and whether it is the most or (-1) the least that is allowed.
_BOUNDS = {
    "relative": ("tolerance", 1),
    "worst_row": ("row_tolerance", 1),
    "own_row": ("own_row_tolerance", 1),
    "worst_tile": ("tile_tolerance", 1),
    "least_row": ("least_row_tolerance", -1),
    "bias": ("bias_tolerance", 1),
}


def _malformed(
    example: Example, inputs: Inputs, tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float]
) -> str | None:
    shapes = dict(zip(inputs.gradient_names, (tuple(one.shape) for one in inputs.leaves), strict=True))
    shapes["out"] = tuple(inputs.d_out_bhsd.shape)
    for name, tensor in tensors.items():
        wrong = malformed(name, tensor, shape=shapes[name], like=inputs.q_bhsd, scales=scales)
        if wrong is not None:
            return wrong
    return None


def _in_float64(part: Part, wanted: Expected, *, with_gradients: bool) -> Expected:
    """Return what is expected with a reference in float64, whose own rounding is nothing."""
    exact = reference(part.case, part.inputs, with_gradients=with_gradients, precision=torch.float64)
    return replace(wanted, tensors=wanted.tensors | exact)


def _widened(case: Case, wanted: Expected, bounds: list[dict[str, Tolerance]]) -> Expected:
    """Return what is expected with the widest tolerances, times a factor, and what rounding a score may cost."""
    score = _OF_SCORES * (wanted.largest_score or 0.0)
    unit = unit_of(case)
    widest = {
        name: _widest([own, *(one.get(name, own) for one in bounds)], score, unit)
        for name, own in wanted.tolerances.items()
    }
    if min(case.head_dim, case.value_dim) < _LEAST_DIM:
        widest = {name: Tolerance(one.relative, one.worst_row) for name, one in widest.items()}
    return replace(wanted, tolerances=widest)


def _widest(bounds: list[Tolerance], score: float, unit: float) -> Tolerance:
    def most(field: str, more: float = 0.0) -> Any:
        values = [getattr(one, field) for one in bounds]
        return None if None in values else _FACTOR * (max(values) + score) + more

    least = bounds[0].least_row
    return replace(
        bounds[0],
        **{field: most(field) for field in ("relative", "worst_row", "own_row", "tile")},
        # Weights that are all equal are all rounded alike.
        bias=most("bias", unit),
        least_row=None if least is None else least / _FACTOR,
        # Seldom of use for tensors as small as those of a hunt.
        usual=None,
        channel=None,
    )


@contextmanager
def _alone(device: str) -> Iterator[None]:
    """Compute the reference in one thread on a CPU: for small tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device == "cpu":
            torch.set_num_threads(threads)


def _poisoned(device: str) -> bool:
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
