"""Looks at timed calls that are not copied as a whole: a few rows of each head, and sums of gradients."""

import random
from collections.abc import Mapping, Sequence

import torch

from attn_exp.attention.call_sums import CallSums, Summing
from attn_exp.attention.fresh_inputs import State
from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.attention.probe import Probe, draw_places
from attn_exp.core.case import Case
from attn_exp.worker.judge.timed_pass import TimedPass, put

# How many calls of a pass have a few of their rows looked at by device, and how many sets of rows these choose from.
_PROBES, _PLACES = {"cuda": 8, "cpu": 24}, 64
# How many have sums, which need no reference. After the first ones it is one call of so many by device: a GPU gets
# twenty small kernels for each, and a full queue would hold the host up.
_SUMS, _FIRST_SUMS, _ONE_OF = 32, 8, {"cuda": 4, "cpu": 1}


class Looks:
    """Takes rows and sums of calls; nothing waits for them, and they are compared after the timing.

    Args:
        case: the problem.
        read: what the calls read; a block's inputs are not looked at.
        scales: the factors of results in codes, which are known after the first call.
    """

    def __init__(self, case: Case, read: DifferentiableInputs, scales: Mapping[str, float]) -> None:
        # Seeded by the system, so that no seed that a backend sets foretells what is drawn.
        self._dice = random.Random(random.SystemRandom().getrandbits(128))
        self._batch, self._device = case.batch, read.d_out.device
        # Made now: copying indices to a GPU between timed calls would make the host wait for it.
        self._places = draw_places(case, self._device, _PLACES) if isinstance(read, Inputs) else []
        self._scales, self._names = scales, read.gradient_names
        self.summing = Summing(case, read, scales) if isinstance(read, Inputs) else None

    def perhaps(
        self, known: TimedPass, returned: Sequence[torch.Tensor], state: State, out: torch.Tensor | None
    ) -> None:
        """Look at a timed call if it is among those chosen at random.

        Args:
            known: its pass, which counts it already.
            returned: `out`, the gradients, or both.
            state: how its inputs differ from those of the seed.
            out: what a backward is of, None if it is not known.
        """
        if not self._places:
            return
        # Reservoir sampling, of rows and of sums.
        slot = self._dice.randrange(known.count)
        most = _PROBES[self._device.type]
        if slot < most:
            put(known.probes, most, slot, self._rows(known.count, returned, state))
        if len(returned) > 1 and slot < _SUMS:
            dense = known.count <= _FIRST_SUMS or self._dice.randrange(_ONE_OF[self._device.type]) == 0
            if dense and (sums := self._sums(known.count, returned, out)):
                put(known.sums, _SUMS, slot, sums)

    def at(self, known: TimedPass, returned: Sequence[torch.Tensor], state: State, out: torch.Tensor | None) -> None:
        """Look at a call; the arguments are those of `perhaps`."""
        if self._places:
            known.probes.append(self._rows(known.count, returned, state))
            if sums := self._sums(known.count, returned, out):
                known.sums.append(sums)

    def _rows(self, index: int, returned: Sequence[torch.Tensor], state: State) -> Probe:
        """Take rows of `out`, or of dq: a wrong output of a step has wrong gradients."""
        places = self._dice.choice(self._places)
        name, tensor = ("out", returned[0]) if len(returned) == 1 else ("dq", self._gradients(returned)[0])
        # A later backward may have another scale.
        return Probe(places, places.of(tensor).squeeze(0), state, index, self._scales.get(name, 1.0))

    def _sums(self, index: int, returned: Sequence[torch.Tensor], out: torch.Tensor | None) -> CallSums | None:
        if self.summing is None:
            return None
        out = returned[0] if len(returned) > len(self._names) else out
        return self.summing.taken(self._dice.randrange(self._batch), index, self._gradients(returned)[:3], out)

    def _gradients(self, returned: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the gradients of what a backward or a step returned, dq, dk and dv first."""
        return returned[-len(self._names) :]
