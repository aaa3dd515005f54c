"""FlashAttention 3 and FlashMLA as vLLM ships them, for Hopper: a cache in pages, and latent keys. Forward only."""

from typing import Any

import torch

from attn_exp.attention.inputs import Inputs, paged
from attn_exp.attention.scores import sinks_of
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.bshd import BshdAttention, bshd_calls, flash_window, paged_calls, starts_of
from attn_exp.backends.fa3 import FlashAttention3
from attn_exp.backends.flashmla import FlashMla
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


class VllmFlash3(DeclarativeBackend):
    """vLLM's copy of FlashAttention 3: `flash_attn_varlen_func` with `fa_version=3`, with a block table.

    Run with vllm 0.24.0 (vllm/vllm_flash_attn/flash_attn_interface.py). A plan of the work of its blocks belongs to the
    preparation where there are pages, since vLLM makes one for all layers of a step. Of latent keys, the channels
    behind the values are keys of their own and the values are keys as well (`q_v`), as in vLLM's backend for MLA.
    """

    # hopper/flash_api.cpp, mha_fwd; vLLM builds no backward. vLLM pads its batches with empty requests
    # (https://github.com/vllm-project/vllm/blob/main/vllm/v1/worker/gpu_model_runner.py, `query_start_loc`).
    supports = Supports(
        passes=("forward",),
        align=("bottom_right",),
        masks=("window",),
        features=("softcap", "sink", "latent", "packed", "ragged", "empty_requests", "paged"),
        keyless=True,
        largest_head_dim=256,
        head_dim_multiple=8,
        value_dims=((192, 128), (576, 512)),
        capabilities=(9,),
    )
    package = Package("vllm", "vllm.vllm_flash_attn", "pip install vllm")
    claimed_share = FUSED_SHARE
    claims = {("cuda", "forward"): FlashAttention3.claims["cuda", "forward"]}

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse latent keys of other dimensions than DeepSeek's, and their values with keys of their own."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.latent != (case.head_dim == 576):
            return f"{self.name} takes latent keys of 576 with values of 512 alone, as model=deepseek_v3_mla has"
        if refusal is None and case.sink and (case.latent or case.dtype != "bfloat16"):
            # hopper/flash_api.cpp: "We only support bf16 dtype for S aux."
            return f"{self.name} has sinks in bfloat16 without latent keys: set dtype=bf16, or sink=false"
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Make the plan once, untimed."""
        library = self.package.load()
        in_pages = paged(case, inputs)
        if in_pages.paging is not None:
            return paged_calls(_packed(library, case, in_pages), case, in_pages)
        return bshd_calls(_packed(library, case, inputs), inputs)


def _packed(library: Any, case: Case, inputs: Inputs) -> BshdAttention:
    """Return the library's function of queries without a batch, and of keys without one or in pages."""
    device, paging = inputs.q_bhsd.device, inputs.paging
    q_lengths = case.lengths or (case.q_len,) * case.batch
    kv_lengths = case.kv_lengths or case.lengths or (case.kv_len,) * case.batch
    starts = starts_of(q_lengths, device)
    window = flash_window(causal=case.causal, window=case.window)
    options: dict[str, Any] = {
        "max_seqlen_q": max(q_lengths),
        "cu_seqlens_q": starts,
        "max_seqlen_k": max(kv_lengths),
        "softmax_scale": case.head_dim**-0.5,
        "causal": case.causal,
        "window_size": list(window),
        "softcap": case.softcap or 0.0,
        "fa_version": 3,
    }
    if (sinks := sinks_of(case, device)) is not None:
        options["s_aux"] = sinks.flatten()
    if paging is None:
        options["cu_seqlens_k"] = starts_of(kv_lengths, device)
    else:
        lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=device)
        options |= {"seqused_k": lengths, "block_table": paging.pages.table}
        options["scheduler_metadata"] = library.get_scheduler_metadata(
            batch_size=len(q_lengths),
            max_seqlen_q=max(q_lengths),
            max_seqlen_k=max(kv_lengths),
            num_heads_q=case.q_heads,
            num_heads_kv=case.kv_heads,
            headdim=case.head_dim - case.value_dim if case.latent else case.head_dim,
            headdim_v=case.value_dim,
            cache_seqlens=lengths,
            qkv_dtype=inputs.q_bhsd.dtype,
            cu_seqlens_q=starts,
            page_size=paging.pages.page_size,
            causal=case.causal,
            window_size=window,
            has_softcap=case.softcap is not None,
        )

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = q.flatten(0, 1)
        keys, values = (k, v) if paging is not None else (k.flatten(0, 1), v.flatten(0, 1))
        of_values = {}
        if case.latent:
            rows, of_values["q_v"] = rows[..., case.value_dim :], rows[..., : case.value_dim]
            keys = keys[..., case.value_dim :]
        out = library.flash_attn_varlen_func(rows, keys, values, **of_values, **options)
        of_requests: torch.Tensor = out.unflatten(0, (len(q), -1))
        return of_requests

    return attention


class VllmFlashMla(FlashMla):
    """vLLM's copy of FlashMLA, which comes as a wheel.

    Run with vllm 0.24.0 (vllm/third_party/flashmla/flash_mla_interface.py).
    """

    package = Package("vllm", "vllm.third_party.flashmla.flash_mla_interface", "pip install vllm")
