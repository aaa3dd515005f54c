"""FlashAttention 2 from the package `flash-attn`. SDPA's `flash` is a copy of it that ships with PyTorch."""

from functools import partial

import torch

from attn_exp.attention.inputs import Inputs, paged
from attn_exp.backends.base import FUSED_SHARE, Calls, Reproducible
from attn_exp.backends.bshd import bshd_calls, flash_window, paged_calls, sequence_starts, unbatched
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case


class FlashAttention2(Reproducible):
    """FlashAttention 2 of the package flash-attn; `flash` is the copy of it that ships with PyTorch.

    Run on an H100 with 2.8.4 at commit 0251105, built for head dimensions up to 128; such a build computes 256 without
    an error and wrongly. Written against 2.8.3 (flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp).
    `deterministic` selects the backward that sums in a fixed order.
    """

    supports = Supports(
        align=("bottom_right",),
        masks=("window",),
        features=("softcap", "packed", "paged"),
        page_sizes=(256,),
        # "If the row of the mask is all zero, the output will be zero."
        keyless=True,
        # Head dimensions that are not multiples of 8 are padded at each call.
        largest_head_dim=256,
        capability=(8, 0),
    )
    # Not the module `flash_attn`: flash-attn-4 installs into a folder of that name.
    package = Package(
        "flash-attn", "flash_attn.flash_attn_interface", 'pip install "flash-attn>=2.8,<3" --no-build-isolation'
    )
    claimed_share = FUSED_SHARE
    # PyTorch's copy is `pytorch_flash::flash_fwd_kernel`. A single query for each sequence runs
    # `flash_fwd_splitkv_kernel`.
    claims = {("cuda", "forward"): r"\bflash::flash_fwd", ("cuda", "backward"): r"\bflash::flash_bwd"}

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse packed sequences in pages: the function of caches takes as many queries of each request."""
        if case.lengths is not None and case.page_size is not None:
            return f"{self.name} has no paged cache of packed sequences: set lengths=null, or cache=contiguous"
        return super().unsupported(case, device)

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Build the sequence starts once, untimed."""
        flash_attn = self.package.load()
        options = {
            "causal": case.causal,
            "window_size": flash_window(causal=case.causal, window=case.window),
            "softcap": case.softcap or 0.0,
            "deterministic": self.deterministic,
        }
        in_pages = paged(case, inputs)
        if in_pages.paging is not None:
            pages = in_pages.paging.pages
            lengths = torch.tensor(pages.lengths, dtype=torch.int32, device=pages.table.device)
            # It has no backward, and sums in a fixed order.
            del options["deterministic"]
            of_pools = partial(
                flash_attn.flash_attn_with_kvcache, cache_seqlens=lengths, block_table=pages.table, **options
            )
            return paged_calls(of_pools, case, in_pages)
        if case.lengths is None:
            return bshd_calls(partial(flash_attn.flash_attn_func, **options), inputs)
        starts, longest = sequence_starts(case, inputs.q_bhsd.device), max(case.lengths)
        packed = partial(
            flash_attn.flash_attn_varlen_func,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return bshd_calls(unbatched(packed), inputs)
