"""Calls between a forward and its backward, on normal inputs with something rare among them."""

import itertools
from dataclasses import dataclass, field, replace
from random import SystemRandom

import torch

from attn_exp.attention.error_parts import Tolerance
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.rare import Rare
from attn_exp.attention.rare_rows import rare_inputs
from attn_exp.backends.base import Calls
from attn_exp.core.request import Request
from attn_exp.timers.sync import synchronize
from attn_exp.worker.attempt import Attempt, status_of
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.timed_pass import Results
from attn_exp.worker.machine.device import Machine


@dataclass
class Between:
    """Makes such calls, and keeps what they found.

    Attributes:
        attempt: the job.
        machine: has the tolerances of normal inputs.
        request: the job, of the attention alone.
        calls: of the backend.
        judge: changes the inputs.
        seeded: the normal inputs.
        wrong: what is wrong with the calls.
        overwritten: whether one of the forwards wrote over the output.
        gradients: those of the backward among them, as they were returned.
        copies: parts of these as they were then.
    """

    attempt: Attempt
    machine: Machine
    request: Request
    calls: Calls
    judge: Judge
    seeded: Inputs
    wrong: list[str] = field(default_factory=list)
    overwritten: bool = False
    gradients: Results = field(default_factory=dict)
    copies: Results = field(default_factory=dict)

    def run(self, out: torch.Tensor, copy: torch.Tensor) -> None:
        """Make forwards while an output is alive, one with its backward, and note whether it is another one now.

        Where the memory does not hold a second graph there are none.

        Args:
            out: the output.
            copy: of it.
        """
        try:
            self._run()
        except Exception as error:  # whatever does not fit
            if status_of(error, "")[0] != "out_of_memory":
                raise
        self.overwritten = not _same(out, copy)

    @property
    def gradients_overwritten(self) -> bool:
        """Whether the gradients that were kept are others now."""
        return any(not _same(_part(one), self.copies[name]) for name, one in self.gradients.items())

    def run_one(self) -> None:
        """Make one of the forwards at random."""
        if (normal := self._normal()) is None:
            return
        rare = rare_inputs(self.request.case, self.seeded)
        if one := next(itertools.islice(rare, SystemRandom().randrange(3), None), None):
            self._judge(one, normal, with_gradients=False)

    def _run(self) -> None:
        normal, made = self._normal(), 0
        if normal is not None:
            for rare in rare_inputs(self.request.case, self.seeded):
                made += 1
                self._judge(rare, normal, with_gradients=self.attempt.with_gradients)
        if not made:
            self.judge.write(self.seeded)
            self.judge.results("forward", self.calls.forward())

    def _judge(self, rare: Rare, normal: dict[str, Tolerance], *, with_gradients: bool) -> None:
        self.judge.write(rare.inputs)
        out = self.calls.forward()
        results = self.judge.results("forward", out)
        if with_gradients and rare.slack_of_dq is not None:
            gradients = self.judge.results("backward", self.calls.backward(out)())
            results |= gradients
            # They are kept until the next backward if the memory holds as many beside them.
            [torch.empty_like(one) for one in gradients.values()]
            self.gradients, self.copies = gradients, {name: _part(one).clone() for name, one in gradients.items()}
        synchronize(self.request.device)
        with self.machine.settings.again():
            self.wrong += filter(None, [rare.wrong(results, normal)])

    def _normal(self) -> dict[str, Tolerance] | None:
        """Return the tolerances of normal inputs, None if they are not known."""
        shared = replace(self.request.case, batch=1), self.attempt.with_gradients
        return self.machine.tolerances.get(shared)


def _part(gradient: torch.Tensor) -> torch.Tensor:
    """Return the last row of each head, which is seldom zeros."""
    return gradient[..., -1:, :]


def _same(one: torch.Tensor, copy: torch.Tensor) -> bool:
    try:
        one, copy = (some.view(torch.uint8) if some.element_size() == 1 else some for some in (one, copy))
        return torch.equal(one, copy)
    except RuntimeError:
        # PyTorch's CUDA graph trees take results back at the next call, and refuse to read them then.
        return False
