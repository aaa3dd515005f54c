"""Public bugs of kernels for NVIDIA GPUs, as PyTorch and its neighbours call them.

Reports that need a library or a machine that attn_exp does not run are not here: flashinfer#4267, cudnn-frontend#384
(sparse attention), cudnn-frontend#745 (fp8 on Blackwell), pytorch#191937 (only the values of a certain model).
"""

import math

import torch
import torch.nn.functional as F
from bugs_anywhere import NO_SUCH_CASE, forced, normal, off
from public_bugs import Bug, NotHere
from torch.nn.attention import SDPBackend

Tensors = tuple[torch.Tensor, ...]
_BF16 = torch.bfloat16


def negative(device: str, q_len: int, kv_len: int, dim: int, heads: int = 1, kv_heads: int = 1) -> Tensors:
    """q, k and v whose scores are all about -120, as in pytorch#196678."""
    q = normal(1, heads, q_len, dim, device=device, dtype=_BF16, seed=1) * 0.1
    k, v = (normal(1, kv_heads, kv_len, dim, device=device, dtype=_BF16, seed=seed) for seed in (2, 3))
    k = k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(dim)
    return q, k, v


def gradients(out: torch.Tensor, operands: Tensors) -> Tensors:
    """The gradients of a random functional of the output."""
    return torch.autograd.grad(out, operands, torch.randn_like(out))


def not_finite(tensors: Tensors, names: str = "qkv") -> tuple[bool, str]:
    """Whether any gradient has a number that is not finite, and how many."""
    counts = {f"d{name}": int((~tensor.isfinite()).sum()) for name, tensor in zip(names, tensors, strict=True)}
    return any(counts.values()), ", ".join(f"{count} not finite in {name}" for name, count in counts.items())


def cudnn(*operands: torch.Tensor, **options: object) -> torch.Tensor:
    """cuDNN through SDPA; NotHere if PyTorch refuses."""
    try:
        return forced(SDPBackend.CUDNN_ATTENTION, *operands, **options)
    except RuntimeError as error:
        raise NotHere(f"PyTorch refuses cuDNN: {str(error).splitlines()[0][:80]}") from error


def masked_tail(device: str) -> tuple[bool, str]:
    leaves = tuple(tensor.requires_grad_() for tensor in negative(device, 704, 704, 64))
    mask = torch.ones(704, 704, dtype=torch.bool, device=device).tril()[None, None]
    there, seen = not_finite(gradients(cudnn(*leaves, attn_mask=mask), leaves))
    causal, _ = not_finite(gradients(cudnn(*leaves, is_causal=True), leaves))
    return there, f"{seen}; with is_causal and no mask {'too' if causal else 'all are finite'}"


def one_query(device: str) -> tuple[bool, str]:
    leaves = tuple(tensor.requires_grad_() for tensor in negative(device, 1, 128, 64, 2, 2))
    return not_finite(gradients(cudnn(*leaves), leaves))


def decoding(device: str) -> tuple[bool, str]:
    q, k, v = negative(device, 1, 700, 128, 28, 4)
    out = cudnn(q, k, v, enable_gqa=True)
    error = off(out, forced(SDPBackend.MATH, q.float(), k.float(), v.float(), enable_gqa=True))
    return error > 0.05, f"28 query heads on 4, scores of -120: off by {error:.2g}"


def many_keys(device: str) -> tuple[bool, str]:
    leaves = tuple(
        normal(1, 16, length, 64, device=device, dtype=_BF16, seed=length).requires_grad_()
        for length in (1, 2**16, 2**16)
    )
    out = cudnn(*leaves)
    return not_finite(gradients(out, leaves))


def wide_mask(device: str) -> tuple[bool, str]:
    n, last = 65_600, 128
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        raise NotHere("it needs 30 GiB")
    q, k, v = (normal(1, 1, n, 64, device=device, dtype=_BF16, seed=seed) for seed in range(3))
    mask = torch.zeros(n, n, dtype=_BF16, device=device)
    for first in range(0, n, 4096):
        mask[first : first + 4096] = torch.randn(n, device=device, dtype=_BF16) * 4
    mask[-last:] = torch.randn(last, n, device=device, dtype=_BF16) * 4
    out = forced(SDPBackend.EFFICIENT_ATTENTION, q, k, v, attn_mask=mask[None, None])[:, :, -last:]
    error = off(out, forced(SDPBackend.MATH, q[:, :, -last:], k, v, attn_mask=mask[None, None, -last:]))
    return error > 0.05, f"the last {last} of {n:,} queries are off by {error:.2g}"


def mask_gradient(device: str) -> tuple[bool, str]:
    q, k, v = (normal(1, 1, 64, 16, device=device, seed=seed) for seed in range(3))
    mask = normal(1, 1, 64, 64, device=device, seed=3).requires_grad_()
    found = torch.autograd.grad(forced(SDPBackend.EFFICIENT_ATTENTION, q, k, v, attn_mask=mask).sum(), mask)[0]
    right = torch.autograd.grad(forced(SDPBackend.MATH, q, k, v, attn_mask=mask).sum(), mask)[0]
    torch.cuda.synchronize()
    return off(found, right) > 1e-3, f"the mask's gradient is off by {off(found, right):.2g}"


def many_heads(device: str) -> tuple[bool, str]:
    q, k, v = (normal(1, 65_536, 4, 8, device=device, dtype=torch.half, seed=seed) for seed in range(3))
    out = forced(SDPBackend.EFFICIENT_ATTENTION, q, k, v)
    error = off(out[:, -8:], forced(SDPBackend.MATH, q[:, -8:], k[:, -8:], v[:, -8:]))
    return error > 0.01, f"65,536 heads: the last are off by {error:.2g}"


def flex_tail(device: str) -> tuple[bool, str]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = tuple(normal(1, 1, 1025, 64, device=device, dtype=_BF16, seed=seed).requires_grad_() for seed in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1025, 1025, device=device)
    out = torch.compile(flex_attention)(*leaves, score_mod=lambda s, b, h, i, j: s + (i - j), block_mask=mask)
    return not_finite(gradients(out, leaves))


def flex_far_keys(device: str) -> tuple[bool, str]:
    from torch.nn.attention.flex_attention import flex_attention

    length, batch = 24_000, 700
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        raise NotHere("it needs 60 GiB")
    q = normal(batch, 1, 256, 128, device=device, dtype=_BF16).requires_grad_()
    k, v = (
        normal(length, batch, 128, device=device, dtype=_BF16, seed=seed).permute(1, 0, 2)[:, None].requires_grad_()
        for seed in (1, 2)
    )
    out = torch.compile(flex_attention, fullgraph=True)(q, k, v)
    found = gradients(out, (q, k, v))
    torch.cuda.synchronize()
    last = [tensor.detach()[-1:].requires_grad_() for tensor in (q, k, v)]
    error = off(out[-1:], forced(SDPBackend.MATH, *last))
    there, seen = not_finite(found)
    return there or error > 0.05, f"the last row of the batch is off by {error:.2g}, {seen}"


def fa4_function() -> object:
    """FlashAttention 4's function; NotHere without it."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        raise NotHere("flash-attn-4 is not installed") from error
    return flash_attn_func


def fa4_hidden_tile(device: str) -> tuple[bool, str]:
    attention = fa4_function()
    q, k, v = negative(device, 88, 448, 128, 14, 2)
    out = attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=True)  # type: ignore[operator]
    out = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    seen = torch.ones(88, 448, dtype=torch.bool, device=device).tril(360)
    right = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=seen, enable_gqa=True)
    return off(out, right) > 0.1, f"88 queries on 448 keys, scores of -120: off by {off(out, right):.2g}"


def fa4_padded_width(device: str) -> tuple[bool, str]:
    attention = fa4_function()
    leaves = tuple(normal(1, 512, 8, 72, device=device, dtype=_BF16, seed=seed).requires_grad_() for seed in range(3))
    d_out = normal(1, 512, 8, 72, device=device, dtype=_BF16, seed=3)
    out = attention(*leaves)  # type: ignore[operator]
    found = torch.autograd.grad(out[0] if isinstance(out, tuple) else out, leaves, d_out)[0]
    wide = tuple(leaf.detach().float().transpose(1, 2).requires_grad_() for leaf in leaves)
    right = torch.autograd.grad(forced(SDPBackend.MATH, *wide), wide, d_out.float().transpose(1, 2))[0]
    error = off(found.transpose(1, 2), right)
    return error > 0.05, f"dq at head_dim 72 is off by {error:.2g}"


_NO_MASK = NO_SUCH_CASE + "a mask as a tensor"
_HARD = "`python bench/hard_values.py OUT --kinds negative {}`"
CUDA = (
    Bug("pytorch#196678", "cuDNN's dq is NaN with a mask, 64 beyond a multiple of 128", masked_tail, _NO_MASK),
    Bug(
        "cudnn-frontend#1072", "cuDNN's dk and dv are NaN for one query and very negative scores", one_query,
        _HARD.format("cudnn cudnn_graph") + ", its cases of one query",
    ),
    Bug(
        "pytorch#193893", "cuDNN decodes wrongly with few key-value heads (reported of a B200)", decoding,
        _HARD.format("cudnn cudnn_graph") + ", its cases of one query",
    ),
    Bug(
        "pytorch#138529", "cuDNN's backward has no plan for one query on 65,536 keys", many_keys,
        "`attn-exp run backend=cudnn q_len=1 kv_len=65536`", raises="cuDNN|CUDNN",
    ),
    Bug("pytorch#187227", "efficient attention reads wrong rows of a mask above 2^32 numbers", wide_mask, _NO_MASK),
    Bug(
        "pytorch#148476", "efficient attention's backward fails if only the mask needs a gradient", mask_gradient,
        _NO_MASK, raises="illegal memory access", ends=True,
    ),
    Bug(
        "pytorch#177985", "efficient attention cannot launch 65,536 heads", many_heads,
        NO_SUCH_CASE + "more than 16,384 heads", raises="invalid configuration|invalid argument",
    ),
    Bug(
        "flash-attention#2896", "FlashAttention 4's dq is wrong at head_dim 72 and 104", fa4_padded_width,
        NO_SUCH_CASE + "such a head_dim for backend=fa4",
    ),
    Bug(
        "flash-attention#2082", "FlashAttention 4 takes 0 for the maximum after a hidden tile", fa4_hidden_tile,
        _HARD.format("fa4") + ", its cases of 88 queries on 448 keys",
    ),
    Bug(
        "pytorch#153799", "FlexAttention's gradients are NaN at 1,025 tokens with a mask and a score_mod", flex_tail,
        NO_SUCH_CASE + "a bias that grows with the distance",
    ),
    Bug(
        "pytorch#190857", "FlexAttention's backward reads beyond 2^31 numbers at 32-bit offsets", flex_far_keys,
        "`attn-exp hunt backend=flex where='large and backward' budget=5m`", raises="illegal memory access", ends=True,
    ),
)  # fmt: skip
