"""Quantised cases: e4m3 codes in and out. Computed in float32 from dequantised inputs, so that any device runs them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from attn_exp.attention.formula import formula, hidden_keys, masked
from attn_exp.attention.inputs import Inputs, quantised
from attn_exp.backends.base import Calls
from attn_exp.core.case import Case
from cheats.gpu.base import CODES, WRONG, OnGpu, gpu_cheat, gpu_honest

_CAUSAL = replace(CODES, causal=True)


class OfCodes(OnGpu):
    """Dequantises, computes the formula in float32 and rounds its output to codes with the scale of v."""

    def scope(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def case_of(self, case: Case) -> Case:
        """Return the case to compute."""
        return case

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Return q as it is used."""
        return q

    def spoiled(self, out: torch.Tensor) -> torch.Tensor:
        """Return the output as it is rounded."""
        return out

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls; there is no backward."""
        assert inputs.scales is not None
        asked, scale = self.case_of(case), inputs.scales.v
        hidden = hidden_keys(asked, 0, case.q_len, inputs.q_bhsd.device) if masked(asked) else None

        def forward() -> torch.Tensor:
            q, k, v = inputs.numbers().qkv
            return quantised(self.spoiled(formula(asked, hidden, self.query(q), k, v)), scale).codes

        def backward(out: torch.Tensor) -> Any:
            raise NotImplementedError("codes have no backward here")

        return Calls(forward, backward, inputs=inputs, scales={"out": scale})


@gpu_honest(case=_CAUSAL)
class CodesByTheFormula(OfCodes):
    """Codes, dequantised in each call, with the scale of v for the output."""


@gpu_cheat("fp8", "inaccurate", WRONG, case=CODES)
class EveryTwoHundredthRowIsZero(OfCodes):
    """Every 200th query's output is zero."""

    def spoiled(self, out: torch.Tensor) -> torch.Tensor:
        out[:, :, ::200] = 0
        return out


@gpu_cheat("fp8", "inaccurate", WRONG, case=CODES)
class LastRowsHaveTheOtherSign(OfCodes):
    """The last eight queries of one head have the sign flipped."""

    def spoiled(self, out: torch.Tensor) -> torch.Tensor:
        out[:, 1, -8:] *= -1
        return out


@gpu_cheat("fp8", "inaccurate", WRONG, case=CODES)
class ScaleOfTheOutputOffByFivePercent(OfCodes):
    """The output's scale is 5 % off."""

    def spoiled(self, out: torch.Tensor) -> torch.Tensor:
        return out * 1.05


@gpu_cheat("fp8", "inaccurate", WRONG, case=CODES)
class ScaleOfTheScoresOffByFivePercent(OfCodes):
    """The scores' scale is 5 % off."""

    def query(self, q: torch.Tensor) -> torch.Tensor:
        return q * 1.05


@gpu_cheat("fp8", "inaccurate", WRONG, case=_CAUSAL)
class WindowNobodyAskedFor(OfCodes):
    """Queries see only the last three quarters of the keys."""

    def case_of(self, case: Case) -> Case:
        return replace(case, window=case.kv_len * 3 // 4)


@gpu_cheat("fp8", "inaccurate", WRONG, case=_CAUSAL)
class CausalOffByOneOfCodes(OfCodes):
    """Queries do not see their own key, but for the first one."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls of a mask that hides the diagonal."""
        assert inputs.scales is not None
        scale, hidden = inputs.scales.v, hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device)
        hidden |= torch.eye(case.q_len, case.kv_len, dtype=torch.bool, device=hidden.device)
        hidden[0, 0] = False

        def forward() -> torch.Tensor:
            return quantised(formula(case, hidden, *inputs.numbers().qkv), scale).codes

        return replace(super().prepare(case, inputs), forward=forward)
