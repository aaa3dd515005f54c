"""What the shipped backends call, as source: the public function of the library, with its arguments for a case."""

from dataclasses import dataclass, field

from attn_exp.attention.autograd import Function
from attn_exp.attention.biases import biased
from attn_exp.backends.base import Backend
from attn_exp.backends.bshd import flash_window
from attn_exp.backends.compiled import Compiled
from attn_exp.backends.eager import Eager
from attn_exp.backends.fa2 import FlashAttention2
from attn_exp.backends.fa3 import FlashAttention3
from attn_exp.backends.fa4 import FlashAttention4
from attn_exp.backends.flex import Flex
from attn_exp.backends.sdpa import AtenCudnn, Forced, Priority, Sdpa
from attn_exp.core.case import Case
from attn_exp.hunt.own_function import source_of


@dataclass(frozen=True)
class Source:
    """Lines of a program: its imports, and what defines `candidate(q, k, v)`. With `why_not`, what is missing."""

    imports: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    why_not: str = ""


def source(backend: Backend, case: Case, attention: Function | None) -> Source:
    """Return the source of a backend's call.

    Args:
        backend: the backend.
        case: the problem.
        attention: the backend's function of q, k and v, if it has one.
    """
    if isinstance(backend, Sdpa):
        return _sdpa(backend, case)
    if isinstance(backend, Eager):
        compiled = isinstance(backend, Compiled)
        return Source([], ["candidate = torch.compile(formula)" if compiled else "candidate = formula"])
    if isinstance(backend, Flex):
        return _flex(backend, case)
    if isinstance(backend, FlashAttention2 | FlashAttention3 | FlashAttention4) and not case.quantised:
        return _flash(backend, case)
    found = source_of(attention)
    if isinstance(found, str):
        return Source([], ["def candidate(q, k, v):", "    raise NotImplementedError('call the kernel here')"], found)
    return Source(*found)


def _sdpa(backend: Sdpa, case: Case) -> Source:
    causal, grouped = not case.dense, case.q_heads != case.kv_heads
    imports = ["import torch.nn.functional as F"]
    bias = "added[None].to(dtype)"
    if causal:
        # That of SDPA, aligned top-left.
        hidden = f"torch.ones({case.q_len}, {case.kv_len}, device=device, dtype=torch.bool).triu(1)"
        bias += f".masked_fill({hidden}, -torch.inf)"
    arguments = (f"attn_mask={bias}" if biased(case) else f"is_causal={causal}") + ", enable_gqa=True" * grouped
    call = f"return F.scaled_dot_product_attention(q, k, v, {arguments})"
    forced = ""
    if isinstance(backend, AtenCudnn):
        imports = []
        call = f"return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, {causal})[0]"
    elif isinstance(backend, Forced):
        forced = f"SDPBackend.{backend.choice.name}"
    elif isinstance(backend, Priority):
        forced = f"[{', '.join(f'SDPBackend.{one.name}' for one in backend.order)}], set_priority=True"
    if not forced:
        return Source(imports, ["def candidate(q, k, v):", f"    {call}"])
    imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
    return Source(imports, ["def candidate(q, k, v):", f"    with sdpa_kernel({forced}):", f"        {call}"])


def _flex(backend: Flex, case: Case) -> Source:
    imports = ["from torch.nn.attention.flex_attention import create_block_mask, flex_attention"]
    arguments, lines = [], []
    if not case.dense:
        seen = ["(k >= 0)"]
        start = "0" if case.lengths is None else "start[q]"
        own = f"(k <= q + {case.offset})"
        seen += [own if case.prefix is None else f"({own} | (k < {start} + {case.prefix}))"] if case.causal else []
        seen += [f"(k > q + {case.offset - case.window})"] if case.window is not None else []
        if case.chunk is not None:
            seen.append(f"((k - {start}) // {case.chunk} == (q + {case.offset} - {start}) // {case.chunk})")
        if case.lengths is not None:
            lengths = list(case.lengths)
            of = f"torch.tensor({lengths}, device=device)"
            lines.append(f"sequence = torch.repeat_interleave(torch.arange({len(lengths)}, device=device), {of})")
            seen.append("(sequence[q] == sequence[k])")
            if "start[q]" in " ".join(seen):
                lines.append(f"start = ({of}.cumsum(0) - {of})[sequence]")
        sizes = f"None, None, {case.q_len}, {case.kv_len}, device=device"
        lines.append(f"mask = create_block_mask(lambda b, h, q, k: {' & '.join(seen)}, {sizes})")
        arguments.append("block_mask=mask")
    cap = f"{case.softcap:g}" if case.softcap is not None else ""
    score = f"{cap} * torch.tanh(score / {cap})" if cap else "score"
    score += " + added[h, q, k]" if biased(case) else ""
    arguments += [f"score_mod=lambda score, b, h, q, k: {score}"] if score != "score" else []
    arguments += ["enable_gqa=True"] if case.q_heads != case.kv_heads else []
    arguments += [f"kernel_options={backend.kernel_options}"] if backend.kernel_options else []
    lines.append("compiled = torch.compile(flex_attention, dynamic=False)")
    call = ", ".join(["q", "k", "v", *arguments])
    return Source(imports, [*lines, "def candidate(q, k, v):", f"    return compiled({call})"])


def _flash(backend: FlashAttention2 | FlashAttention3 | FlashAttention4, case: Case) -> Source:
    module = backend.package.module
    left, right = flash_window(causal=case.causal, window=case.window)
    window = (None if left < 0 else left, None if right < 0 else right) if "cute" in module else (left, right)
    arguments = [f"causal={case.causal}", f"window_size={window}", f"softcap={float(case.softcap or 0)}"]
    arguments += ["deterministic=True"] if backend.deterministic else []
    bshd = "*(t.transpose(1, 2) for t in (q, k, v))"
    name, before = "flash_attn_func", []
    if case.lengths is not None:
        name, bshd = "flash_attn_varlen_func", "*(t[0].transpose(0, 1) for t in (q, k, v))"
        ends = [sum(case.lengths[:count]) for count in range(len(case.lengths) + 1)]
        before = [f"starts = torch.tensor({ends}, dtype=torch.int32, device=device)"]
        arguments += ["cu_seqlens_q=starts", "cu_seqlens_k=starts"]
        arguments += [f"max_seqlen_q={max(case.lengths)}", f"max_seqlen_k={max(case.lengths)}"]
    lines = ["def candidate(q, k, v):", f"    out = {name}({bshd}, {', '.join(arguments)})"]
    lines.append("    out = out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp too")
    lines.append(f"    return {'out.transpose(0, 1)[None]' if case.lengths is not None else 'out.transpose(1, 2)'}")
    return Source([f"from {module} import {name}"], [*before, *lines])
