"""Attention as the formula says, softmax(q kT / sqrt(d)) v, one PyTorch operator after another."""

from functools import partial

import torch

from attn_exp.backends.base import Calls, autograd_backward
from attn_exp.case import Case
from attn_exp.inputs import Inputs


class Eager:
    """The plain formula in the case's own dtype; the scores are held in memory, whole."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported(self, case: Case, device: str) -> str | None:
        """Refuses only rows without keys, whose softmax is 0 / 0."""
        if case.causal and case.align == "bottom_right" and case.q_len > case.kv_len:
            return "the first queries see no key, their softmax is undefined: set align=top_left or q_len <= kv_len"
        if case.window is not None and case.align == "top_left" and case.q_len - case.window >= case.kv_len:
            return "the last queries see no key, their softmax is undefined: widen the window, or lower q_len"
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """The mask is built once, and not timed."""
        mask = hidden_keys(case, 0, case.q_len, inputs.q_bhsd.device) if case.causal else None
        return Calls(partial(_formula, case, inputs, mask), partial(autograd_backward, inputs))

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """A softmax kernel of its own, which no fused attention has."""
        return r"(?i)softmax"


def hidden_keys(case: Case, first_row: int, rows: int, device: torch.device) -> torch.Tensor:
    """Boolean (rows, kv_len), True where the causal mask or its window hides the key from query `first_row` + i."""
    last_seen = torch.arange(first_row, first_row + rows, device=device) + case.offset
    key = torch.arange(case.kv_len, device=device)[None, :]
    hidden = key > last_seen[:, None]
    return hidden if case.window is None else hidden | (key <= last_seen[:, None] - case.window)


def _formula(case: Case, inputs: Inputs, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = inputs.qkv
    if case.kv_heads != case.q_heads:
        k = k.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
        v = v.repeat_interleave(case.q_heads // case.kv_heads, dim=1)
    scores = q @ k.mT * case.head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v
