"""Public bugs that need no GPU: those of PyTorch's CPU kernels, and of what Inductor makes of attention."""

import math

import torch
import torch.nn.functional as F
from public_bugs import Bug
from torch.nn.attention import SDPBackend, sdpa_kernel

NO_SUCH_CASE = "no case has "


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, NaN counted as infinite."""
    return (found.double() - right.double()).abs().nan_to_num(math.inf).max().item()


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers of a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def forced(backend: SDPBackend, *operands: torch.Tensor, **options: object) -> torch.Tensor:
    """SDPA with one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*operands, **options)  # type: ignore[arg-type]


def permuted_keys(device: str) -> tuple[bool, str]:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # (batch, tokens, heads, dim) to (batch, heads, dim, tokens) at once.
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)) * 8**-0.5
        return torch.matmul(scores.softmax(-1), v.transpose(1, 2))

    q, k, v = (normal(2, 2, 2, 8, device=device, seed=seed) for seed in range(3))
    with torch.no_grad():
        error = off(torch.compile(attention)(q, k, v), attention(q, k, v))
    return error > 1e-3, f"compiled and eager differ by {error:.2g}"


def longer_values(device: str) -> tuple[bool, str]:
    q, v = normal(1, 1, 3, 8, device=device), normal(1, 1, 6, 8, device=device, seed=2)
    whole = normal(1, 1, 6, 8, device=device, seed=1)
    try:
        out = forced(SDPBackend.FLASH_ATTENTION, q, whole[:, :, :5], v)
    except RuntimeError as error:
        return False, f"refused: {str(error).splitlines()[0][:80]}"
    right = forced(SDPBackend.MATH, q, whole, v)
    read = "the key behind the tensor's end was read" if off(out, right) < 1e-5 else "no error, other numbers"
    return True, f"5 keys and 6 values: {read}"


def no_channels(device: str) -> tuple[bool, str]:
    q, v = torch.empty(1, 2, 16, 0, device=device), normal(1, 2, 16, 4, device=device)
    error = off(F.scaled_dot_product_attention(q, q, v, scale=1.0), v.mean(2, keepdim=True))
    return error > 1e-5, f"with head_dim 0 the output is off the mean of v by {error:.2g}"


def five_dimensions(device: str) -> tuple[bool, str]:
    layer = torch.nn.Linear(8, 8, device=device)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q5, k5, v5 = q.view(1, 1, 2, 1, 8), k.view(1, 1, 2, 2, 8), v.view(1, 1, 2, 2, 8)
        weights = (torch.matmul(q5, k5.transpose(-2, -1)) / 8**0.5).softmax(-1)
        return layer(weights.matmul(v5).view(2, 1, 8))

    q, k, v = (normal(2, length, 8, device=device, seed=length) for length in (1, 2, 2))
    with torch.no_grad():
        error = off(torch.compile(attention)(q, k, v), attention(q, k, v))
    return error > 1e-3, f"it compiles; the difference is {error:.2g}"


def tensor_scale(device: str) -> tuple[bool, str]:
    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        return F.softmax(q @ k.transpose(-2, -1) / scale + mask, dim=-1) @ v

    q, k, v = (normal(1, 2, 8, 8, device=device, seed=seed) for seed in range(3))
    mask = torch.full((8, 8), -1e9, device=device).triu(1)
    scale = torch.tensor(0.5, device=device)
    error = off(torch.compile(attention)(q, k, v, mask, scale), attention(q, k, v, mask, scale))
    return error > 1e-3, f"it compiles; the difference is {error:.2g}"


def double_backward(device: str) -> tuple[bool, str]:
    x = normal(1, 2, 4, 4, device=device, dtype=torch.float64).requires_grad_()

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    (found,) = torch.autograd.grad(torch.compile(attention)(x).sum(), x)
    (right,) = torch.autograd.grad(attention(x).sum(), x)
    return off(found, right) > 1e-6, f"it runs; the gradients differ by {off(found, right):.2g}"


def nan_inputs(device: str) -> tuple[bool, str]:
    q, k, v = (normal(2, 4, 16, 8, device=device, seed=seed) for seed in range(3))
    share = forced(SDPBackend.FLASH_ATTENTION, q + torch.nan, k, v).isnan().float().mean().item()
    return share < 1, f"of queries of NaN, {share:.0%} of the output is NaN"


def hidden_first_tiles(device: str) -> tuple[bool, str]:
    n = 640
    rows, keys = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    hidden = torch.zeros(n, n, device=device).masked_fill((keys > rows) | (keys <= rows - 10), -torch.inf)
    x = torch.ones(1, 1, n, 4, device=device)
    share = forced(SDPBackend.FLASH_ATTENTION, x, x, x, attn_mask=hidden).isnan().float().mean().item()
    return share > 0, f"with a window of 10 of 640 keys, {share:.0%} of the output is NaN"


def no_queries(device: str) -> tuple[bool, str]:
    x = torch.zeros(7, 7, 0, 7, dtype=torch.half, device=device)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)[0]
    return False, f"an output of shape {tuple(out.shape)}"


def inner_strides(device: str) -> tuple[bool, str]:
    q, k, v = (normal(1, 2, 64, 32, device=device, seed=seed).transpose(2, 3) for seed in range(3))
    right = forced(SDPBackend.MATH, q, k, v)
    chosen = off(F.scaled_dot_product_attention(q, k, v), right)
    direct = off(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0], right)
    return max(chosen, direct) > 1e-4, f"through SDPA off by {chosen:.2g}, through the operator by {direct:.2g}"


def longer_block_mask(device: str) -> tuple[bool, str]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, 2, None, 128, 256, device=device)
    q, k, v = (3 * normal(2, 1, 2, 16, device=device, seed=seed) for seed in range(3))
    try:
        out = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=mask)
    except Exception as error:
        if "mask" in str(error):
            return False, f"refused: {str(error).splitlines()[0][:80]}"
        raise
    error = off(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return error > 1e-2, f"a block mask of 128 x 256 for 2 x 2: off by {error:.2g}"


def nan_behind_the_mask(device: str) -> tuple[bool, str]:
    q, k, v = (normal(1, 1, 4, 8, device=device, seed=seed) for seed in range(3))
    v[:, :, 3] = torch.nan
    seen = torch.ones(4, 4, dtype=torch.bool, device=device)
    seen[:, 3] = False
    share = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).isnan().float().mean().item()
    return share > 0, f"of NaN in a value that no query sees, {share:.0%} of the output is NaN"


def kept_choice(device: str) -> tuple[bool, str]:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache
    from torch.profiler import profile

    q = normal(1, 1, 64, 32, device=device, dtype=torch.bfloat16)
    names = {}
    with fresh_cache():
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            torch.compiler.reset()
            attention = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), dynamic=False)
            with sdpa_kernel(backend), torch.no_grad():
                attention(q)
                with profile() as kept:
                    attention(q)
            names[backend.name] = sorted({event.key for event in kept.key_averages() if "flash" in event.key})
    found = counters["aot_autograd"]["autograd_cache_hit"]
    there = found > 0 and bool(names["MATH"])
    return there, f"compiled for FLASH_ATTENTION first, MATH runs {names['MATH'] or 'no flash attention'}"


_COMPILED = "`attn-exp hunt backend._target_=permuted_keys.PermutedKeys` (bench/permuted_keys.py)"
ANYWHERE = (
    Bug(
        "pytorch#195320", "Inductor's SDPA fusion takes any permutation of k for a transposition", permuted_keys,
        _COMPILED, devices=("cpu", "cuda"), raises="broadcast a dimension",
    ),
    Bug(
        "pytorch#185449", "compiled SDPA runs the backend for which the same graph was compiled before", kept_choice,
        "none: each backend compiles into cache entries of its own", devices=("cpu", "cuda"),
    ),
    Bug(
        "pytorch#193728", "CPU flash reads keys behind the end if there are more values", longer_values,
        NO_SUCH_CASE + "more values than keys", devices=("cpu",),
    ),
    Bug(
        "pytorch#184330", "SDPA returns zeros for head_dim 0", no_channels,
        NO_SUCH_CASE + "head_dim 0", devices=("cpu", "cuda"),
    ),
    Bug(
        "pytorch#195589", "Inductor's SDPA fusion fails on five dimensions", five_dimensions,
        NO_SUCH_CASE + "five dimensions", devices=("cpu", "cuda"), raises="must be 2D",
    ),
    Bug(
        "pytorch#191203", "Inductor's SDPA fusion fails on a scale that is a tensor", tensor_scale,
        NO_SUCH_CASE + "a scale of its own", devices=("cpu", "cuda"), raises="Inductor|Lowering|Backend",
    ),
    Bug(
        "pytorch#185539", "compiled SDPA's causal backward fails in float64 on a CPU", double_backward,
        NO_SUCH_CASE + "dtype float64", devices=("cpu",), raises="expected scalar type",
    ),
    Bug(
        "pytorch#141128", "CPU flash turns queries of NaN into zeros", nan_inputs,
        NO_SUCH_CASE + "inputs of NaN", devices=("cpu",),
    ),
    Bug(
        "pytorch#127055", "CPU flash returns NaN where the first tiles are hidden", hidden_first_tiles,
        NO_SUCH_CASE + "a mask as a tensor", devices=("cpu",),
    ),
    Bug(
        "pytorch#141219", "CPU flash divides by zero without queries", no_queries,
        NO_SUCH_CASE + "q_len 0", devices=("cpu",), ends=True,
    ),
    Bug(
        "pytorch#187506", "CPU flash ignores the step of the innermost dimension", inner_strides,
        NO_SUCH_CASE + "channels that do not lie next to each other", devices=("cpu",),
    ),
    Bug(
        "pytorch#139462", "FlexAttention returns zeros behind the first row of the batch", longer_block_mask,
        NO_SUCH_CASE + "a block mask of other lengths", devices=("cpu", "cuda"),
    ),
    Bug(
        "pytorch#101967", "SDPA lets NaN through the mask", nan_behind_the_mask,
        NO_SUCH_CASE + "inputs of NaN", devices=("cpu", "cuda"),
    ),
)  # fmt: skip
