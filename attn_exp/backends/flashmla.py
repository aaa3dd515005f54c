"""DeepSeek's FlashMLA: decoding with a cache of latents. Forward only."""

import torch

from attn_exp.attention.inputs import Inputs, paged
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.bshd import bshd_calls, paged_calls
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case

# The only length of a page that its dense kernel takes (csrc/api/dense_decode.h).
_PAGE = 64


class FlashMla(DeclarativeBackend):
    """FlashMLA's `flash_mla_with_kvcache`: latent keys in pages of 64, behind each other or as a cache has them.

    It is built from source and has run only as `vllm_flashmla`, vLLM's copy. Written against commit 9241ae3
    (flash_mla/flash_mla_interface.py), which plans the work of its blocks in the first call. That and the block table
    belong to the preparation, since a model's layers share them.
    """

    supports = Supports(
        passes=("forward",),
        align=("bottom_right",),
        features=("latent", "paged"),
        head_dims=(576,),
        value_dims=((576, 512),),
        page_sizes=(_PAGE,),
        capabilities=(9,),
    )
    package = Package(
        "flash_mla",
        "flash_mla",
        "git clone --recursive https://github.com/deepseek-ai/FlashMLA and pip install -v . there",
    )
    # If keys are split, another kernel combines the parts.
    claimed_share = FUSED_SHARE
    # csrc/sm90/decode/dense/splitkv_mla.cuh.
    claims = {("cuda", "forward"): r"flash_fwd_splitkv_mla_kernel"}

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse keys that are not latent, and lengths that do not fill their pages."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.value_dim == case.head_dim:
            return f"{self.name} takes head dimensions of 576 only with values of 512, not 576"
        if refusal is None and not case.latent:
            return f"{self.name} has only latent values: set latent=true, as model=deepseek_v3_mla has"
        if refusal is None and case.page_size is None and case.kv_len % _PAGE:
            return f"{self.name} has pages of {_PAGE} keys: set a kv_len that is a multiple, not {case.kv_len}"
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Make the block table and the plan once, untimed."""
        library, device = self.package.load(), inputs.q_bhsd.device
        lengths = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=device)
        in_pages = paged(case, inputs)
        if in_pages.paging is None:
            pages = torch.arange(case.batch * case.kv_len // _PAGE, dtype=torch.int32, device=device)
            table = pages.view(case.batch, -1)
        else:
            table = in_pages.paging.pages.table
        # Older versions plan here, and take the queries of each head of keys.
        plan, splits = library.get_mla_metadata(lengths, case.q_len * case.q_heads // case.kv_heads, case.kv_heads)
        options = {"softmax_scale": case.head_dim**-0.5, "causal": not case.dense}

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            in_blocks = k.reshape(-1, _PAGE, *k.shape[2:])
            arguments = (q, in_blocks, table, lengths, case.value_dim, plan, splits)
            out: torch.Tensor = library.flash_mla_with_kvcache(*arguments, **options)[0]
            return out

        return bshd_calls(attention, inputs) if in_pages is inputs else paged_calls(attention, case, in_pages)
