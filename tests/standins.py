"""Stand-ins for attention libraries: their functions by name and signature, their documented meaning in plain PyTorch.

Masks are written from the libraries' documentation, not from `Case`: a backend's translation is put to the test.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch


def visible(q_len, kv_len, left, right, *, top_left=False):
    """FlashAttention's window, both ends inclusive, -1 without bound: True where a query sees a key."""
    own = torch.arange(q_len)[:, None] + (0 if top_left else kv_len - q_len)
    key = torch.arange(kv_len)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left >= 0:
        seen &= key >= own - left
    if right >= 0:
        seen &= key <= own + right
    return seen


def _scores(q, k, seen, softcap):
    """(batch, heads, queries, keys) in float64, hidden ones at -inf, and the slope of the softcap."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    slope = torch.ones_like(scores)
    if softcap:
        slope = 1 - torch.tanh(scores / softcap) ** 2
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, float("-inf")), slope


def forward(q, k, v, seen, softcap=0.0):
    """Of BSHD tensors: the output likewise, and the log-sum-exp (batch, heads, queries) in float32."""
    scores, _ = _scores(q, k, seen, softcap)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double()).to(q.dtype).contiguous(), lse.float()


def backward(d_out, q, k, v, out, lse, seen, softcap=0.0):
    """dq, dk and dv from what the forward left."""
    group = q.shape[2] // k.shape[2]
    scores, slope = _scores(q, k, seen, softcap)
    weights = torch.exp(scores - lse.double()[..., None]).nan_to_num(0.0)
    wide_v, wide_k = (tensor.double().repeat_interleave(group, dim=2) for tensor in (v, k))
    d_weights = torch.einsum("bqhd,bkhd->bhqk", d_out.double(), wide_v)
    row_sums = (d_out.double() * out.double()).sum(-1).transpose(1, 2)
    d_scores = weights * (d_weights - row_sums[..., None]) * slope * q.shape[-1] ** -0.5
    dq = torch.einsum("bhqk,bkhd->bqhd", d_scores, wide_k)
    dk = torch.einsum("bhqk,bqhd->bkhd", d_scores, q.double())
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, d_out.double())
    dk, dv = (tensor.unflatten(2, (k.shape[2], group)).sum(3) for tensor in (dk, dv))
    # Libraries allocate gradients as their inputs lie.
    return tuple(torch.empty_like(like).copy_(made) for made, like in ((dq, q), (dk, k), (dv, v)))


class _Plain(torch.autograd.Function):
    """The two as one differentiable function, of one sequence."""

    @staticmethod
    def forward(ctx, q, k, v, seen, softcap):
        out, lse = forward(q, k, v, seen, softcap)
        ctx.save_for_backward(q, k, v, out, lse, seen)
        ctx.softcap = softcap
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse, seen = ctx.saved_tensors
        return *backward(d_out, q, k, v, out, lse, seen, ctx.softcap), None, None


def plain(q, k, v, left, right, softcap=0.0, *, top_left=False, sinks=None):
    """Differentiable attention of BSHD tensors under a window; `sinks` (heads,) are scores without a value."""
    if sinks is not None:
        assert sinks.shape == (q.shape[2],)
        scores, _ = _scores(q, k, visible(q.shape[1], k.shape[1], left, right), softcap)
        column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        v = v.double().repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)
    return _Plain.apply(q, k, v, visible(q.shape[1], k.shape[1], left, right, top_left=top_left), softcap)


def pieces(starts):
    """Slices of packed sequences, int32 starts and the last end, on the tensors' device."""
    assert starts.dtype == torch.int32
    return [slice(begin, end) for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False)]


def packed(q, k, v, starts, longest, left, right, softcap=0.0, starts_of_keys=None, sinks=None):
    """`plain` of each of the sequences of packed tensors (tokens, heads, dim)."""
    of_queries, of_keys = pieces(starts), pieces(starts if starts_of_keys is None else starts_of_keys)
    assert longest == max(piece.stop - piece.start for piece in of_queries)
    outs = [
        plain(q[None, piece], k[None, keys], v[None, keys], left, right, softcap, sinks=sinks)[0]
        for piece, keys in zip(of_queries, of_keys, strict=True)
    ]
    return torch.cat(outs)


def _contiguous(*tensors_bshd):
    for tensor in tensors_bshd:
        assert tensor.is_contiguous(), "the library would copy this"


def install(monkeypatch, name, **members):
    """Put a module of these members, and empty parents, where an import finds them."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules or depth == len(parts):
            made = ModuleType(path)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, path, made)
            if depth > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], made, raising=False)
    for key, member in members.items():
        monkeypatch.setattr(sys.modules[name], key, member, raising=False)
    return sys.modules[name]


def install_fa2(monkeypatch):
    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        _contiguous(q, k, v)
        left, right = window_size
        return plain(q, k, v, left, 0 if causal else right, softcap)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        _contiguous(q, k, v)
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k
        return packed(q, k, v, cu_seqlens_q, max_seqlen_q, window_size[0], 0 if causal else window_size[1], softcap)

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    return install(monkeypatch, "flash_attn.flash_attn_interface", **functions)


def install_varlen(monkeypatch):
    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        _contiguous(query, key, value)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert max_k == cu_seq_k.diff().max()
        return packed(query, key, value, cu_seq_q, max_q, *window_size, starts_of_keys=cu_seq_k)

    return install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)


def install_fa4(monkeypatch):
    def bounds(causal, window_size):
        assert all(size is None or size >= 0 for size in window_size)
        left, right = (-1 if size is None else size for size in window_size)
        return left, 0 if causal else right

    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    ):  # fmt: skip
        _contiguous(q, k, v)
        return plain(q, k, v, *bounds(causal, window_size), softcap, sinks=learnable_sink), None

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, deterministic=False,
    ):  # fmt: skip
        seen = bounds(causal, window_size)
        return packed(q, k, v, cu_seqlens_q, max_seqlen_q, *seen, softcap, sinks=learnable_sink), None

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    return install(monkeypatch, "flash_attn.cute", **functions)


def _numbers(q, k, v, *descales):
    """Codes times what each key-value head's are worth, in bfloat16, which the output is then in."""
    kv_heads = k.shape[2]
    assert all(descale.shape == (q.shape[0], kv_heads) and descale.dtype == torch.float32 for descale in descales)
    groups = (q.shape[2] // kv_heads, 1, 1)
    factors = (descale.repeat_interleave(group, 1) for descale, group in zip(descales, groups, strict=True))
    return tuple(
        (codes.float() * factor[:, None, :, None]).bfloat16() for codes, factor in zip((q, k, v), factors, strict=True)
    )


def install_fa3(monkeypatch):
    """Returns the list of what the backward was asked, for options that do not show in numbers."""
    asked = []

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        _contiguous(q, k, v)
        assert softmax_scale == q.shape[-1] ** -0.5
        if q.dtype == torch.float8_e4m3fn:
            assert cu_seqlens_q is None, "packed codes have no stand-in"
            q, k, v = _numbers(q, k, v, q_descale, k_descale, v_descale)
        right = 0 if causal else window_size_right
        nothing = torch.tensor([])
        if cu_seqlens_q is None:
            return (
                *forward(q, k, v, visible(q.shape[1], k.shape[1], window_size_left, right), softcap),
                nothing,
                nothing,
            )
        made = []
        for piece in pieces(cu_seqlens_q):
            length = piece.stop - piece.start
            seen = visible(length, length, window_size_left, right)
            made.append(forward(q[None, piece], k[None, piece], v[None, piece], seen, softcap))
        outs, lses = zip(*made, strict=True)
        return torch.cat(outs, 1)[0].clone(), torch.cat(lses, -1)[0].clone(), nothing, nothing

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        asked.append({"deterministic": deterministic})
        right = 0 if is_causal else window_size_right
        if cu_seqlens_q is None:
            seen = visible(q.shape[1], k.shape[1], window_size_left, right)
            made = backward(dout, q, k, v, out, softmax_lse, seen, softcap)
            for into, gradient in zip((dq, dk, dv), made, strict=True):
                into.copy_(gradient)
            return softmax_lse
        for piece in pieces(cu_seqlens_q):
            length = piece.stop - piece.start
            seen = visible(length, length, window_size_left, right)
            ones = (tensor[None, piece] for tensor in (dout, q, k, v, out))
            made = backward(*ones, softmax_lse[None, :, piece], seen, softcap)
            for into, gradient in zip((dq, dk, dv), made, strict=True):
                into[piece].copy_(gradient[0])
        return softmax_lse

    functions = {"_flash_attn_forward": _flash_attn_forward, "_flash_attn_backward": _flash_attn_backward}
    install(monkeypatch, "flash_attn_interface", **functions)
    return asked


class Bias:
    """One of xFormers' masks: which keys of (queries, keys) it lets through."""

    def seen(self, q_len, kv_len):
        raise NotImplementedError


class LowerTriangularMask(Bias):
    def seen(self, q_len, kv_len):
        return visible(q_len, kv_len, -1, 0, top_left=True)


class LowerTriangularFromBottomRightMask(Bias):
    def seen(self, q_len, kv_len):
        return visible(q_len, kv_len, -1, 0)


class LowerTriangularFromBottomRightLocalAttentionMask(Bias):
    def __init__(self, window_size):
        self.window_size = window_size

    def seen(self, q_len, kv_len):
        # "whose distance to the final key is greater than or equal to X + window_size" is hidden.
        return visible(q_len, kv_len, self.window_size - 1, 0)


class BlockDiagonalMask(Bias):
    def __init__(self, lengths, left=-1, right=-1):
        self.lengths, self.left, self.right = lengths, left, right

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert isinstance(q_seqlen, list)
        return cls(q_seqlen)

    def make_causal(self):
        return BlockDiagonalMask(self.lengths, right=0)

    def make_local_attention(self, window_size):
        return BlockDiagonalMask(self.lengths, window_size - 1, 0)

    def seen(self, q_len, kv_len):
        return torch.block_diag(*(visible(n, n, self.left, self.right).int() for n in self.lengths)).bool()


def install_xformers(monkeypatch, *, failed=None, built=("cutlass", "flash3")):
    """`failed` is the error that xFormers' extension was loaded with, `built` has the operators that are there."""
    operators = {}
    for name in ("cutlass", "flash3"):
        available = staticmethod(lambda name=name: name in built)
        operators[name] = SimpleNamespace(FwOp=type("FwOp", (), {"is_available": available}), BwOp=type("BwOp", (), {}))
    flash3 = operators["flash3"]

    def seen(q, k, attn_bias):
        none = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        return none if attn_bias is None else attn_bias.seen(q.shape[1], k.shape[1])

    def same_heads(q, k, v):
        assert q.shape[2] == k.shape[2] == v.shape[2], "xFormers does not broadcast heads"

    def memory_efficient_attention(q, k, v, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        same_heads(q, k, v)
        assert op == (operators["cutlass"].FwOp, operators["cutlass"].BwOp)
        return _Plain.apply(q, k, v, seen(q, k, attn_bias), 0.0)

    def forward_requires_grad(q, k, v, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        same_heads(q, k, v)
        assert op is flash3.FwOp
        assert not isinstance(attn_bias, LowerTriangularMask) or q.shape[1] == k.shape[1]
        return forward(q, k, v, seen(q, k, attn_bias))

    def memory_efficient_attention_backward(grad, output, lse, q, k, v, attn_bias=None, p=0.0, scale=None, *, op=None):
        assert op is flash3.BwOp
        return backward(grad, q, k, v, output, lse, seen(q, k, attn_bias))

    masks = (
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        LowerTriangularFromBottomRightLocalAttentionMask,
        BlockDiagonalMask,
    )
    install(monkeypatch, "xformers._cpp_lib", _cpp_library_load_exception=failed)
    return install(
        monkeypatch,
        "xformers.ops.fmha",
        **operators,
        attn_bias=SimpleNamespace(**{mask.__name__: mask for mask in masks}),
        memory_efficient_attention=memory_efficient_attention,
        memory_efficient_attention_forward_requires_grad=forward_requires_grad,
        memory_efficient_attention_backward=memory_efficient_attention_backward,
    )


def install_te(monkeypatch):
    class DotProductAttention(torch.nn.Module):
        def __init__(
            self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
            attn_mask_type="causal", window_size=None, softcap=0.0, attention_type="self",
        ):  # fmt: skip
            super().__init__()
            causal = "causal" in attn_mask_type
            # check_set_window_size in transformer_engine/pytorch/attention/dot_product_attention/utils.py
            assert window_size == (-1, 0) or window_size[0] >= 0 if causal else window_size == (-1, -1)
            assert attn_mask_type in (
                ("padding", "padding_causal") if qkv_format == "thd" else ("no_mask", "causal", "causal_bottom_right")
            )
            assert attention_dropout == 0.0
            self.shapes = num_attention_heads, num_gqa_groups, kv_channels
            self.format, self.bounds, self.softcap = qkv_format, window_size, softcap
            self.top_left = attn_mask_type == "causal"
            self.attention_type = attention_type

        def forward(self, q, k, v, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None):
            _contiguous(q, k, v)
            assert self.shapes == (q.shape[-2], k.shape[-2], (k.shape[-1], v.shape[-1]))
            assert (self.attention_type == "self") == (q.shape[0 if q.dim() == 3 else 1] == k.shape[-3])
            if self.format == "thd":
                assert max_seqlen_q == max_seqlen_kv
                return packed(q, k, v, cu_seqlens_q, max_seqlen_q, *self.bounds, self.softcap).flatten(-2)
            return plain(q, k, v, *self.bounds, self.softcap, top_left=self.top_left).flatten(-2)

    return install(monkeypatch, "transformer_engine.pytorch", DotProductAttention=DotProductAttention)
