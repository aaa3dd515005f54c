"""Our own fused attention in Triton; the kernels are in attn_exp/kernels."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attn_exp.attention.formula import own_keys, seen_keys
from attn_exp.attention.inputs import Inputs, paged, sinks_in
from attn_exp.attention.pages import CACHE_SCALE
from attn_exp.attention.scores import alibi_slopes, bias_tensor, biased
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import EVERY_FEATURE
from attn_exp.core.case.flops import unmasked_pairs
from attn_exp.core.case.masks import EVERY, Causal, Numbered, Window


class Triton(DeclarativeBackend):
    """Our own fused attention in Triton, forward and backward, autotuned."""

    supports = Supports(
        dtypes=("bfloat16", "float16", "float32"),
        masks=EVERY,
        features=EVERY_FEATURE,
        keyless=True,
        largest_head_dim=256,
        value_dims="any",
        capability=(8, 0),
    )
    generates_triton = True
    package = Package("triton", "triton", "pip install triton")
    claims = {("cuda", "forward"): r"^(forward_kernel|decode_)", ("cuda", "backward"): r"^(dkdv_kernel|dq_kernel)"}

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the operator's calls; Triton compiles and tunes in the first calls."""
        assert self.package is not None
        self.package.load()
        from attn_exp.kernels.triton_attention import attention

        inputs, device = paged(case, inputs), inputs.q_bhsd.device
        mask = mask_of(case, device)
        sinks, added = sinks_in(case, inputs), biases_of(case, device)
        # One slot for each key, as in a cache of pages of one key: pages of any size have the same cost.
        slots = None if inputs.paging is None else inputs.paging.slots.int()
        scale = 1.0 if case.cache_dtype is None else CACHE_SCALE
        options = {"softcap": case.softcap, "sinks": sinks, "added": added, "slots": slots, "cache_scale": scale}
        options["decodes"] = not inputs.q_bhsd.requires_grad and _decodes(case)
        calls = calls_of(partial(attention, **options, **mask), inputs)
        return replace(calls, build_mask=partial(mask_of, case, device)) if "bounds" in mask else calls


def _decodes(case: Case) -> bool:
    """Whether a case has few queries for many keys, and no other mask or score than a causal one."""
    from attn_exp.kernels.decode import LARGEST_ROWS, LEAST_KEYS

    rows = case.q_heads // case.kv_heads * case.q_len
    masked = case.lengths is not None or isinstance(case.mask, Numbered)
    scored = case.softcap is not None or case.sink or biased(case)
    return rows <= LARGEST_ROWS and case.kv_len >= LEAST_KEYS and not (scored or (masked and not case.dense))


def biases_of(case: Case, device: torch.device) -> Any:
    """Return what is added to scores as an argument of `attention`; None if nothing is."""
    from attn_exp.kernels.bounds import added_of

    if not biased(case):
        return None
    bias = bias_tensor(replace(case, alibi=False), device, getattr(torch, case.dtype))
    if not case.alibi:
        return added_of(None, None, bias)
    slopes = torch.tensor(alibi_slopes(case.q_heads), device=device)
    return added_of(slopes, own_keys(case, torch.arange(case.q_len, device=device)), bias)


def mask_of(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the mask as arguments of `attention`: a causal band as numbers, other masks as bounds of each query."""
    from attn_exp.kernels.bounds import bounds_of

    if case.dense:
        return {}
    if case.lengths is None and type(case.mask) in (Causal, Window):
        return {"causal": True, "offset": case.offset, "window": case.window}
    first, last = seen_keys(case, torch.arange(case.q_len, device=device))
    return {"bounds": bounds_of(first, last, case.kv_len, unmasked_pairs(case))}
