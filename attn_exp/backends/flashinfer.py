"""FlashInfer's attention over a ragged or paged cache, and over latent keys. Forward only."""

import math
from typing import Any

import torch

from attn_exp.attention.inputs import Inputs, paged
from attn_exp.attention.pages import CACHE_SCALE, Pages
from attn_exp.attention.scores import sinks_of
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.bshd import BshdAttention, bshd_calls, flash_window, paged_calls, starts_of, unbatched
from attn_exp.backends.package import Package, WrongOption
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case

KERNELS = ("auto", "fa2", "fa3")
# That of vLLM (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE): with 128 MiB, which FlashInfer recommends, plans of large
# batches fail.
_WORKSPACE_BYTES = 394 << 20
# Query heads of a key-value head from which decoding uses tensor cores: SGLang's choice (flashinfer_backend.py,
# should_use_tensor_core).
_TENSOR_CORE_GROUP = 4
# Keys of a page of a cache without pages: it splits keys between pages alone.
_PAGE = 64
# DeepSeek's, the only ones that its kernels for latent keys have.
_LATENT = (576, 512)


class FlashInfer(DeclarativeBackend):
    """FlashInfer's wrappers for prefill, for decoding and for latent keys, each with its own plan.

    Run with flashinfer-python 0.7.2. `plan`, which a model calls once for all of its layers, belongs to the
    preparation, like the compilation with nvcc; `run` is timed. One query for each request goes to
    `BatchDecodeWithPagedKVCacheWrapper`, latent keys to `BatchMLAPagedAttentionWrapper`: for both, a cache without
    pages is one of pages behind each other. All else goes to `BatchPrefillWithPagedKVCacheWrapper` or, without pages,
    `BatchPrefillWithRaggedKVCacheWrapper`, and with sinks to `BatchAttentionWithAttentionSinkWrapper`. `kernel` forces
    its own FlashAttention 2 or 3.
    """

    supports = Supports(
        passes=("forward",),
        align=("bottom_right",),
        masks=("window",),
        # Empty requests: https://github.com/flashinfer-ai/flashinfer/blob/main/include/flashinfer/page.cuh, get_length.
        features=("softcap", "sink", "latent", "packed", "ragged", "empty_requests", "paged", "fp8_cache"),
        head_dims=(64, 128, 192, 256),
        value_dims=((192, 128), _LATENT),
        capability=(8, 0),
    )
    package = Package("flashinfer-python", "flashinfer", 'pip install "flashinfer-python>=0.7,<0.8"')
    # If keys are split, another kernel merges the parts.
    claimed_share = FUSED_SHARE
    # include/flashinfer/attention: prefill.cuh, decode.cuh, mla.cuh, mla_hopper.cuh and hopper/prefill_sm90.cuh.
    claims = {
        ("cuda", "forward"): r"flashinfer::.*(Prefill|Decode)With(RaggedKV|PagedKV|KV)CacheKernel"
        r"|flashinfer::.*BatchMLAPaged?Attention(Hopper)?Kernel"
    }

    def __init__(self, name: str, kernel: str = "auto") -> None:
        super().__init__(name)
        if kernel not in KERNELS:
            raise WrongOption(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
        self.kernel = kernel

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse FlashAttention 3 on other GPUs than Hopper, and what only some of its wrappers have."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.head_dim == case.value_dim == 192:
            return f"{self.name} takes head dimensions of 192 only with values of 128, not 192"
        if refusal is None and case.latent != ((case.head_dim, case.value_dim) == _LATENT):
            return f"{self.name} takes latent keys of 576 with values of 512 alone, as model=deepseek_v3_mla has"
        lacks: dict[str, Any] = {key: getattr(case, key) for key in ("softcap", "window", "cache_dtype")}
        lacks["lengths"] = None if case.page_size else case.lengths
        lacking = next((key for key, value in lacks.items() if case.latent and value is not None), None)
        if refusal is None and lacking:
            return f"{self.name} has no {lacking} with latent keys: set {lacking}=null"
        if refusal is None and case.sink:
            # flashinfer/jit/attention/variants.py, `AttentionSink`: no softcap and no scale of codes.
            lacks = {"softcap": case.softcap, "cache_dtype": case.cache_dtype, "latent": case.latent or None}
            lacks["lengths"] = None if case.page_size else case.lengths
            lacking = next((key for key, value in lacks.items() if value is not None), None)
            refusal = lacking and f"{self.name} has no sinks with {lacking}: set sink=false, or leave {lacking} out"
        if refusal is None and self.kernel == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            return f"{self.name} has kernel=fa3 only on compute capability 9.0: set kernel=auto"
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Compile the kernels and plan their work once, untimed."""
        library = self.package.load()
        in_pages = paged(case, inputs)
        notes = {"forward_workspace_bytes": float(_WORKSPACE_BYTES)}
        decodes = case.q_len == 1 and case.lengths is None and case.head_dim == case.value_dim
        if not (in_pages.paging or decodes or case.latent or case.sink):
            return bshd_calls(unbatched(self._ragged(library, case, inputs)), inputs, notes)
        plan = self._latent if case.latent else self._decode if decodes and not case.sink else self._paged
        attention = _of_pool(plan(library, case, in_pages), _pages(case, in_pages).page_size)
        return (
            paged_calls(attention, case, in_pages, notes) if in_pages.paging else bshd_calls(attention, inputs, notes)
        )

    def _ragged(self, library: Any, case: Case, inputs: Inputs) -> BshdAttention:
        wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(_workspace(inputs), "NHD", backend=self.kernel)
        of_keys = starts_of(case.kv_lengths or case.lengths or (case.kv_len,) * case.batch, torch.device("cpu"))
        heads = (case.q_heads, case.kv_heads, case.head_dim, case.value_dim)
        wrapper.plan(_query_starts(case), of_keys, *heads, causal=case.causal, **_options(case, inputs))
        run: BshdAttention = wrapper.run
        return run

    def _paged(self, library: Any, case: Case, inputs: Inputs) -> BshdAttention:
        heads = (case.q_heads, case.kv_heads, case.head_dim)
        where, page_size = _where(case, inputs)
        options = _options(case, inputs) | {"causal": case.causal, "head_dim_vo": case.value_dim}
        kind, of_sinks = library.BatchPrefillWithPagedKVCacheWrapper, {}
        if case.sink:
            kind = library.BatchAttentionWithAttentionSinkWrapper
            of_sinks = {name: options[name] for name in ("q_data_type", "window_left")}
            of_sinks |= {
                "kv_data_type": inputs.k_bhsd.dtype,
                "head_dim_qk": case.head_dim,
                "head_dim_vo": case.value_dim,
            }
        wrapper = kind(_workspace(inputs), "NHD", backend=self.kernel, **of_sinks)
        wrapper.plan(_query_starts(case), *where, *heads, page_size, kv_data_type=inputs.k_bhsd.dtype, **options)
        return _scaled(wrapper.run, case, inputs.q_bhsd.device)

    def _decode(self, library: Any, case: Case, inputs: Inputs) -> BshdAttention:
        group = case.q_heads // case.kv_heads
        tensor_cores = group >= _TENSOR_CORE_GROUP or self.kernel == "fa3"
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(inputs), "NHD", use_tensor_cores=tensor_cores, backend=self.kernel
        )
        heads = (case.q_heads, case.kv_heads, case.head_dim)
        where, page_size = _where(case, inputs)
        wrapper.plan(*where, *heads, page_size, kv_data_type=inputs.k_bhsd.dtype, **_options(case, inputs))
        return _scaled(wrapper.run, case, inputs.q_bhsd.device)

    def _latent(self, library: Any, case: Case, inputs: Inputs) -> BshdAttention:
        mla, device = library.mla, inputs.q_bhsd.device
        wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(inputs), backend=self.kernel)
        pages = _pages(case, inputs)
        tensors = (_query_starts(case), starts_of(pages.pages_of_requests, torch.device("cpu")), pages.indices)
        lengths = torch.tensor(pages.lengths, dtype=torch.int32)
        dtype = inputs.q_bhsd.dtype
        wrapper.plan(
            metadata=mla.MLAPlanMetadata.csr(*(tensor.to(device) for tensor in (*tensors, lengths))),
            num_heads=case.q_heads,
            head_dim_ckv=case.value_dim,
            head_dim_kpe=case.head_dim - case.value_dim,
            page_size=pages.page_size,
            causal=case.causal,
            sm_scale=case.head_dim**-0.5,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(query=q, kv_cache=k.squeeze(2))
            return out

        return run


def _of_pool(run: BshdAttention, page_size: int) -> BshdAttention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (tensor.reshape(-1, page_size, *tensor.shape[2:]) for tensor in (k, v))
        out: torch.Tensor = run(q.flatten(0, 1), k, v).unflatten(0, (len(q), -1))
        return out

    return attention


def _scaled(run: Any, case: Case, device: torch.device) -> BshdAttention:
    sinks = sinks_of(case, device)
    # The kernel's own arguments, which follow the cache.
    own = () if sinks is None else (sinks.float().flatten(), case.head_dim**-0.5)
    scales = {} if case.cache_dtype is None else {"k_scale": CACHE_SCALE, "v_scale": CACHE_SCALE}

    def of_pool(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(q, (k, v), *own, **scales)
        return out

    return of_pool


def _workspace(inputs: Inputs) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q_bhsd.device)


def _query_starts(case: Case) -> torch.Tensor:
    return starts_of(case.lengths or (case.q_len,) * case.batch, torch.device("cpu"))


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    return {
        # Inclusive and without the query's own key, as FlashAttention's.
        "window_left": flash_window(causal=case.causal, window=case.window)[0],
        "logits_soft_cap": case.softcap,
        "sm_scale": case.head_dim**-0.5,
        "q_data_type": inputs.q_bhsd.dtype,
    }


def _pages(case: Case, inputs: Inputs) -> Pages:
    """Return the pages of the inputs, or those that a cache without pages can be seen as."""
    if inputs.paging is not None:
        return inputs.paging.pages
    page_size = math.gcd(case.kv_len, _PAGE)
    count = case.batch * case.kv_len // page_size
    table = torch.arange(count, dtype=torch.int32, device=inputs.q_bhsd.device).view(case.batch, -1)
    return Pages(table, (case.kv_len,) * case.batch, page_size, count)


def _where(case: Case, inputs: Inputs) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], int]:
    """Return where each request's pages start, the pages, the keys of last pages; and the size of a page."""
    pages, host = _pages(case, inputs), torch.device("cpu")
    starts = starts_of(pages.pages_of_requests, host)
    return (starts, pages.indices, pages.keys_of_last_pages.to(host)), pages.page_size
