"""Name a wrong output by the attention that it is instead: of another mask, scale, assignment of heads or length.

These are the mistakes that public reports describe most (issues of flash-attention, SageAttention, LLMs-from-scratch).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from attn_exp.attention.error import Tolerance, tensor_error
from attn_exp.attention.formula import formula, hidden_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.sampled import draw_places, sampled_reference
from attn_exp.attention.scores import bias_tensor, sinks_of
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import FEATURES
from attn_exp.core.case.masks import KINDS, NO_NUMBER

# Heads of keys that are compared, from the first row of the batch.
_HEADS = 8
# The tiles of kernels' loops over keys, at whose ends mistakes cut.
_TILES = (16, 32, 64, 128, 256)
# The parts of scores that may be left out (attn_exp/core/case/features.py).
_SCORES = ("softcap", "sink", "alibi", "bias")
# Scores of the one head on which an inverted mask is tried.
_MOST_SCORES = 1 << 26
# A hypothesis explains a result if little of its error is left.
_LEFT = 0.25


def mistake(
    case: Case,
    inputs: Inputs,
    results: Mapping[str, torch.Tensor],
    tolerances: Mapping[str, Tolerance],
    scales: Mapping[str, float],
) -> str | None:
    """Return which attention wrong `results` are, as a sentence such as "out is attention without its causal mask".

    Results and inputs are those of whole batches, codes with their `scales`. None if no hypothesis explains them.
    """
    if inputs.kind == "faint":
        # Small weights are all of these outputs, and several attentions lose them.
        return None
    inputs, out = inputs.numbers(), results["out"]
    queries, keys = draw_places(case, torch.arange(min(case.kv_heads, _HEADS)))
    found = queries.to(out.device).of(out).float() * scales.get("out", 1.0)

    def error(case: Case, inputs: Inputs) -> float | None:
        rows = sampled_reference(case, inputs, with_gradients=False, places=(queries, keys))
        return tensor_error(found, rows.tensors["out"]).relative

    off, least = error(case, inputs), tolerances["out"].relative
    if off is not None and off <= least:
        if "dq" not in results:
            return None
        return _mistaken_gradients(case, inputs, results["dq"], scales.get("dq", 1.0), tolerances["dq"].relative)
    errors = {words: error(other, given) for words, other, given in _others(case, inputs)}
    errors["with its mask inverted"] = _inverted(case, inputs, out, scales.get("out", 1.0))
    explaining = {words: of for words, of in errors.items() if of is not None and of <= least}
    words = min(explaining, key=lambda name: explaining[name], default=None)
    if words is None or (off is not None and explaining[words] > _LEFT * off):
        return None
    return f"out is attention {words}"


def _others(case: Case, inputs: Inputs) -> Iterator[tuple[str, Case, Inputs]]:
    """Yield in words the attentions that a case is mistaken for, each as a case and its inputs."""
    full = replace(case, causal=False, **NO_NUMBER)
    for name in KINDS:
        if (number := getattr(case, name)) is None:
            continue
        yield f"without its {name} of {number}", replace(case, **NO_NUMBER), inputs
        for wrong in {max(1, number - 1), number + 1} - {number}:
            yield f"with {name}={wrong}", replace(case, **NO_NUMBER | {name: wrong}), inputs
    if case.causal:
        yield "without its causal mask", full, inputs
        if not case.square and case.lengths is None:
            other = "top_left" if case.align == "bottom_right" else "bottom_right"
            yield f"with causal aligned {other.replace('_', ' ')}", replace(case, align=other), inputs
    else:
        yield "with a causal mask", replace(case, causal=True), inputs
    if case.lengths is not None:
        yield "over all packed sequences as one", replace(case, lengths=None, kv_lengths=None), inputs
    for name in _SCORES:
        feature = FEATURES[name]
        if getattr(case, name) != feature.absent:
            yield f"without its {feature.lacking}", replace(case, **{name: feature.absent}), inputs
    yield "with scores that are not scaled", case, _scaled(inputs, case.head_dim**0.5)
    wide = [1 << (case.head_dim - 1).bit_length(), -(-case.head_dim // 32) * 32]
    for padded in sorted({width for width in wide if width > case.head_dim}):
        yield f"with the scale of heads of {padded}", case, _scaled(inputs, (case.head_dim / padded) ** 0.5)
    if 1 < case.kv_heads < case.q_heads and not case.latent:
        heads = torch.arange(case.q_heads, device=inputs.k_bhsd.device) % case.kv_heads
        k, v = (tensor.detach()[:, heads] for tensor in (inputs.k_bhsd, inputs.v_bhsd))
        words = f"in which query head i reads key-value head i % {case.kv_heads}"
        yield words, replace(case, kv_heads=case.q_heads), replace(inputs, k_bhsd=k, v_bhsd=v)
    yield from _cut(case, inputs)


def _scaled(inputs: Inputs, factor: float) -> Inputs:
    return replace(inputs, q_bhsd=inputs.q_bhsd.detach().float() * factor)


def _cut(case: Case, inputs: Inputs) -> Iterator[tuple[str, Case, Inputs]]:
    """Yield the attentions to fewer keys, where these are a case: query 0 sees as many as before."""
    if case.lengths is not None or case.bias is not None or (case.offset and not case.dense):
        return
    masked = replace(case, causal=False, **NO_NUMBER) if case.dense else replace(case, align="top_left")
    shorter = {case.kv_len // size * size for size in (*_TILES, case.page_size or 1)} - {0, case.kv_len}
    for keys in sorted(shorter, reverse=True):
        k, v = inputs.k_bhsd.detach()[:, :, :keys], inputs.v_bhsd.detach()[:, :, :keys]
        words = f"to the first {keys} of {case.kv_len} keys"
        yield words, replace(masked, kv_len=keys), replace(inputs, k_bhsd=k, v_bhsd=v)


def _inverted(case: Case, inputs: Inputs, out: torch.Tensor, scale: float) -> float | None:
    """Return the error of a head if its mask is inverted; queries that then see no key have no output."""
    group = case.q_heads // case.kv_heads
    if case.dense or group * case.q_len * case.kv_len > _MOST_SCORES:
        return None
    head = replace(case, batch=1, q_heads=group, kv_heads=1)
    mask = ~hidden_keys(case, 0, case.q_len, out.device)
    q, k, v = (tensor.detach()[:1, :heads].float() for tensor, heads in zip(inputs.qkv, (group, 1, 1), strict=True))
    bias, sinks = bias_tensor(case, out.device, q.dtype), sinks_of(case, out.device)
    bias, sinks = (one if one is None else one[:, :group].float() for one in (bias, sinks))
    seeing = ~mask.all(-1)
    expected = formula(head, mask, q, k, v, sinks=sinks, bias=bias)
    return tensor_error(out[:1, :group, seeing].float() * scale, expected[:, :, seeing]).relative


def _mistaken_gradients(case: Case, inputs: Inputs, dq: torch.Tensor, scale: float, tolerance: float) -> str | None:
    """Return whether wrong gradients of a right output are those of its sum."""
    ones = replace(inputs, d_out_bhsd=torch.ones_like(inputs.d_out_bhsd))
    queries, keys = draw_places(case, torch.arange(min(case.kv_heads, _HEADS)), torch.arange(1))
    expected = sampled_reference(case, ones, with_gradients=True, places=(queries, keys)).tensors["dq"]
    error = tensor_error(queries.to(expected.device).of(dq).float() * scale, expected).relative
    return "gradients are those of a d_out of ones" if error is not None and error <= tolerance else None
