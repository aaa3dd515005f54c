"""FlashInfer's prefill and append attention over a ragged or paged cache. Forward only."""

import torch

from attn_exp.attention.inputs import Inputs, paged
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.bshd import bshd_calls, flash_window, paged_calls, starts_of, unbatched
from attn_exp.backends.package import Package, WrongOption
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case

KERNELS = ("auto", "fa2", "fa3")
# That of vLLM (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE): with 128 MiB, which FlashInfer recommends, plans of large
# batches fail.
_WORKSPACE_BYTES = 394 << 20


class FlashInfer(DeclarativeBackend):
    """FlashInfer's `BatchPrefillWithRaggedKVCacheWrapper`, and `BatchPrefillWithPagedKVCacheWrapper` of pages.

    Only its `fa2` kernel has run. Written against flashinfer-python 0.7.2 (flashinfer/prefill.py); tested with a
    stand-in.
    `plan`, which a model calls once for all of its layers, belongs to the preparation, like the compilation with nvcc;
    `run` is timed. Pages are not run either, written against 0.6.18's file; that wrapper decodes with tensor cores.
    `kernel` forces its own FlashAttention 2 or 3.
    """

    supports = Supports(
        passes=("forward",),
        align=("bottom_right",),
        window=True,
        softcap=True,
        packed=True,
        ragged=True,
        paged=True,
        head_dims=(64, 128, 192, 256),
        value_dims=((192, 128),),
        capability=(8, 0),
    )
    package = Package("flashinfer-python", "flashinfer", 'pip install "flashinfer-python>=0.7,<0.8"')
    # If keys are split, another kernel merges the parts.
    claimed_share = FUSED_SHARE
    # include/flashinfer/attention: prefill.cuh and hopper/prefill_sm90.cuh.
    claims = {("cuda", "forward"): r"flashinfer::.*PrefillWith(RaggedKV|PagedKV|KV)CacheKernel"}

    def __init__(self, name: str, kernel: str = "auto") -> None:
        super().__init__(name)
        if kernel not in KERNELS:
            raise WrongOption(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
        self.kernel = kernel

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse FlashAttention 3 on other GPUs than Hopper, and equal head dimensions of 192."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.head_dim == case.value_dim == 192:
            return f"{self.name} takes head dimensions of 192 only with values of 128, not 192"
        if refusal is None and self.kernel == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            return f"{self.name} has kernel=fa3 only on compute capability 9.0: set kernel=auto"
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Compile the kernels and plan their work once, untimed."""
        flashinfer = self.package.load()
        device, host = inputs.q_bhsd.device, torch.device("cpu")
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        notes = {"forward_workspace_bytes": float(_WORKSPACE_BYTES)}
        of_queries = starts_of(case.lengths or (case.q_len,) * case.batch, host)
        options = {
            "causal": case.causal,
            # Inclusive and without the query's own key, as FlashAttention's.
            "window_left": flash_window(causal=case.causal, window=case.window)[0],
            "logits_soft_cap": case.softcap,
            "sm_scale": case.head_dim**-0.5,
            "q_data_type": inputs.q_bhsd.dtype,
        }
        in_pages = paged(case, inputs)
        if in_pages.paging is not None:
            pages = in_pages.paging.pages
            of_pool = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.kernel)
            of_pool.plan(
                of_queries,
                starts_of(pages.pages_of_requests, host),
                pages.indices,
                pages.keys_of_last_pages.to(host),
                case.q_heads,
                case.kv_heads,
                case.head_dim,
                pages.page_size,
                head_dim_vo=case.value_dim,
                **options,
            )

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = of_pool.run(q.flatten(0, 1), (k, v)).unflatten(0, (len(q), -1))
                return out

            return paged_calls(run, case, in_pages, notes)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self.kernel)
        of_keys = starts_of(case.kv_lengths or case.lengths or (case.kv_len,) * case.batch, host)
        wrapper.plan(of_queries, of_keys, case.q_heads, case.kv_heads, case.head_dim, case.value_dim, **options)
        return bshd_calls(unbatched(wrapper.run), inputs, notes)
