"""PyTorch's FlexAttention, compiled: the mask is a function that becomes part of a generated Triton kernel."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_exp.attention.formula import own_keys, seen_keys, sequence_ids
from attn_exp.attention.inputs import Attention, Inputs, sinks_in
from attn_exp.attention.scores import alibi_slopes, bias_tensor, biased
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend, calls_of
from attn_exp.backends.bshd import starts_of
from attn_exp.backends.compile import with_own_code
from attn_exp.backends.fa4 import FlashAttention4
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case
from attn_exp.core.case.masks import EVERY


class Flex(DeclarativeBackend):
    """`torch.nn.attention.flex_attention` under torch.compile; `kernel_options` go to its kernels.

    `kernel_options={BACKEND: FLASH}` selects FlashAttention 4's kernels and needs flash-attn-4.
    """

    supports = Supports(
        dtypes=("bfloat16", "float16", "float32"), masks=EVERY,
        features=("softcap", "sink", "alibi", "bias", "latent", "packed", "ragged", "empty_requests"),
        value_dims="any", capability=(8, 0),
        # Its template with 576 needs 344,064 bytes of shared memory; an H100 has 232,448.
        largest_head_dim=512,
    )  # fmt: skip
    generates_triton = True
    claimed_share = FUSED_SHARE
    # Inductor's template kernels (torch/_inductor/kernel/flex).
    claims = {
        ("cuda", "forward"): r"triton_tem_.*flex_attention",
        ("cuda", "backward"): r"triton_tem_.*flex_attention_backward",
    }

    def __init__(self, name: str, kernel_options: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self.kernel_options = kernel_options or {}

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Return the pattern of Inductor's template kernels, or with `BACKEND=FLASH` of FlashAttention 4's."""
        if self.kernel_options.get("BACKEND") == "FLASH":
            return FlashAttention4.claims.get((device, direction))
        return super().claimed_kernels(direction, device)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the block mask and the compiled function; Inductor compiles in the first calls."""
        device = inputs.q_bhsd.device
        attention = flex_function(case, device, self.kernel_options)
        sinks = sinks_in(case, inputs)
        if sinks is not None:
            attention = _with_sinks(attention, sinks)
        calls = calls_of(torch.compile(with_own_code(attention), dynamic=False), inputs)
        return calls if case.dense else replace(calls, build_mask=partial(block_mask_of, case, device))


def flex_function(case: Case, device: torch.device, kernel_options: dict[str, Any]) -> Attention:
    """Return FlexAttention of a case as a function of q, k and v, not compiled yet."""
    from torch.nn.attention.flex_attention import flex_attention

    return partial(
        flex_attention,
        score_mod=_score(case, device),
        block_mask=None if case.dense else block_mask_of(case, device),
        enable_gqa=case.q_heads != case.kv_heads,
        kernel_options=kernel_options or None,
    )


def _score(case: Case, device: torch.device) -> Any:
    """Return what becomes of the score of query index `q` and key index `k` in head `h`; None if nothing does."""
    if case.softcap is None and not biased(case):
        return None
    cap, alibi, several = case.softcap, case.alibi, case.bias == "heads"
    slopes = torch.tensor(alibi_slopes(case.q_heads), device=device)
    own = own_keys(case, torch.arange(case.q_len, device=device))
    bias = bias_tensor(replace(case, alibi=False), device, getattr(torch, case.dtype))

    def modified(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if alibi:
            score = score - slopes[h] * (own[q] - k).abs()
        if bias is not None:
            score = score + bias[0, h if several else 0, q, k]
        return score

    return modified


def block_mask_of(case: Case, device: torch.device) -> Any:
    """Return the `BlockMask` of a case, built as PyTorch's documentation does, without torch.compile."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_mask(case, device), None, None, case.q_len, case.kv_len, device=device)


def _with_sinks(attention: Attention, sinks: torch.Tensor) -> Attention:
    """Return FlexAttention with sinks: the output without them times the share of the keys, sigmoid(lse - sink)."""
    from torch.nn.attention.flex_attention import AuxRequest

    def with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # FlexAttention has one option more than a function of q, k and v.
        out, more = attention(q, k, v, return_aux=AuxRequest(lse=True))  # type: ignore[call-arg]
        made: torch.Tensor = (out * torch.sigmoid(more.lse.unsqueeze(-1) - sinks.float())).to(out.dtype)
        return made

    return with_sinks


def _mask(case: Case, device: torch.device) -> Any:
    """Return a function that says whether query index `q` sees key index `k`, for `create_block_mask`."""
    if case.kv_lengths is not None:
        first, last = seen_keys(case, torch.arange(case.q_len, device=device))
        return lambda b, h, q, k: (k >= first[q]) & (k <= last[q])
    # As numbers: the function is compiled.
    offset, begin, end = case.offset, case.mask.first, case.mask.end
    step, shift, least = (1, 0, None) if end is None else (end.step, end.shift, end.least)
    first_step, first_shift = (1, 0) if begin is None else (begin.step, begin.shift)
    sequence = start = None
    if case.lengths is not None:
        sequence = sequence_ids(case, device)
        start = starts_of(case.lengths, device)[sequence]

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible, first = k >= 0, 0 if start is None else start[q]
        key, own = k - first, q + offset - first
        if end is not None:
            visible = visible & (key < (own if step == 1 else own // step * step) + shift)
        if least is not None:
            visible = visible | (key < least)
        if begin is not None:
            visible = visible & (key >= (own if first_step == 1 else own // first_step * first_step) + first_shift)
        if sequence is not None:
            visible = visible & (sequence[q] == sequence[k])
        return visible

    return seen
