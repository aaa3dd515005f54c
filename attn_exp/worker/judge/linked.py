"""Chooses timed calls whose result the call before tells but for signs, and compares the two."""

import random
from collections.abc import Mapping

import torch

from attn_exp.attention.fresh_inputs import FreshInputs, rows_of
from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.attention.links import Linking
from attn_exp.attention.tolerance import SMALL_BY_WEIGHTS
from attn_exp.core.case import NORMAL
from attn_exp.worker.judge.timed_pass import TimedPass

# One call of so many by device. They are few, since a backend that recognises them could do less in only these: then
# the median of all calls is still that of the others.
_ONE_OF = {"cuda": 16, "cpu": 4}
# The tensors that a call of a pass may tell of the next one. A step changes all of its inputs.
_TOLD = {"forward": ("out",), "backward": ("dq", "dv"), "step": ()}
_MOST = 4096


class Linked:
    """Renews the inputs of timed calls, some of them so that the call before tells the result.

    Args:
        read: what the calls read; only attention on normal inputs has links.
        fresh: changes it.
    """

    def __init__(self, read: DifferentiableInputs, fresh: FreshInputs) -> None:
        # Seeded by the system, so that no seed that a backend sets foretells what is drawn.
        self._dice = random.Random(random.SystemRandom().getrandbits(128))
        self._fresh, self._linking = fresh, None
        if isinstance(read, Inputs) and read.kind == NORMAL:
            of_q, of_v, device = read.q_bhsd.shape[-1], read.v_bhsd.shape[-1], read.d_out.device
            self._linking = Linking({"out": of_v, "dq": of_q, "dv": of_v}, device)
            self._all, self._one_of = torch.ones(of_q, device=device), _ONE_OF[device.type]

    def renew(self, direction: str, known: TimedPass) -> None:
        """Renew what a call of a pass reads."""
        known.linked, known.next_linked = known.next_linked, None
        told = _TOLD[direction]
        if self._linking is not None and told and self._dice.randrange(self._one_of) == 0:
            known.next_linked = self._dice.choice(told)
        match known.linked:
            case "out":
                self._fresh.renew_values()
            case "dq":
                self._fresh.renew_gradient_along(-2)
            case "dv":
                self._fresh.renew_gradient_along(-1)
            case _:
                if direction != "backward":
                    self._fresh.renew()
                if direction != "forward":
                    self._fresh.renew_gradient()

    def look(self, known: TimedPass, results: Mapping[str, torch.Tensor]) -> None:
        """Compare a call with the one before, and keep what it tells of the next one; nothing waits for either."""
        now, before = {}, known.rows
        if self._linking is not None:
            for name in dict.fromkeys(filter(None, (known.linked, known.next_linked))):
                of = {"out": "v", "dv": "d_out"}.get(name)
                channels = self._all if of is None else self._fresh.signs(of)
                rows = self._fresh.signs(rows_of("d_out")) if name == "dq" else None
                now[name] = self._linking.taken(name, results[name], channels=channels, rows=rows)
            if known.linked and known.linked in before and len(known.links) < _MOST:
                name = known.linked
                small = 1.0 if name == "dq" else SMALL_BY_WEIGHTS
                known.links.append(self._linking.link(name, known.count, before[name], now[name], small))
        known.rows = {name: rows for name, rows in now.items() if name == known.next_linked}

    def forget(self, known: TimedPass) -> None:
        """Forget what a call tells of the next one, whose inputs change otherwise."""
        known.linked = known.next_linked = None
        known.rows = {}
