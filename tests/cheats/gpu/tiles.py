"""Triton kernels with one mistake each, and right ones of odd styles; also run in Triton's interpreter on a CPU."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case.case import Case
from cheats.gpu.base import CAUSAL, RAGGED, WRONG, Forward, OnGpu, gpu_cheat, gpu_honest, like_output

RAGGED_CAUSAL = replace(CAUSAL, q_len=1000, kv_len=1000)
_BLOCKS = (64, 64)
# In the interpreter, which is slow: several blocks of a few tokens.
_SMALL_BLOCKS = (16, 32)


class Tiles(OnGpu):
    """The Triton kernel of the corpus; a mistake is one of its constants."""

    mistake: ClassVar[str] = ""

    def scope(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def blocks(self, case: Case, inputs: Inputs) -> tuple[int, int]:
        """Return the queries and keys of a block."""
        return _BLOCKS if inputs.q_bhsd.is_cuda else _SMALL_BLOCKS

    def grid(self, case: Case, block_m: int) -> tuple[int, ...]:
        """Return the numbers of programs."""
        return (-(-case.q_len // block_m), case.batch * case.q_heads)

    def make(self, case: Case, inputs: Inputs) -> Forward:
        """Return the launch."""
        import cheat_kernels

        block_m, block_n = self.blocks(case, inputs)

        def forward() -> torch.Tensor:
            out = like_output(inputs)
            cheat_kernels.attention_kernel[self.grid(case, block_m)](
                *inputs.qkv, out, case.q_len, case.kv_len, case.head_dim**-0.5,
                DIM=case.head_dim, CAUSAL=case.causal, MISTAKE=self.mistake, BLOCK_M=block_m, BLOCK_N=block_n,
            )  # fmt: skip
            return out

        return forward


@gpu_honest(case=RAGGED_CAUSAL)
class TilesRight(Tiles):
    """The Triton kernel without a mistake, at lengths that no block divides."""


@gpu_cheat("triton", "inaccurate", WRONG, case=RAGGED)
class TailTileNeverWritten(Tiles):
    """The grid is rounded down: the last block of queries is what the allocator's memory holds."""

    def grid(self, case: Case, block_m: int) -> tuple[int, ...]:
        return (case.q_len // block_m, case.batch * case.q_heads)


@gpu_cheat("triton", "inaccurate", WRONG)
class SumsNeverRescaled(Tiles):
    """A new maximum rescales the weights' sum, but not the output's."""

    mistake = "rescale"


class _Split(Tiles):
    """The keys in four parts, which a second kernel combines."""

    splits = 4

    def make(self, case: Case, inputs: Inputs) -> Forward:
        """Return the two launches."""
        import cheat_kernels

        (block_m, block_n), heads = self.blocks(case, inputs), case.batch * case.q_heads
        split_len = -(-case.kv_len // self.splits // block_n) * block_n
        splits, device = -(-case.kv_len // split_len), inputs.d_out.device
        sums = torch.empty(splits, heads, case.q_len, case.head_dim, device=device)
        maxima, norms = torch.empty(2, splits, heads, case.q_len, device=device)
        grid = self.grid(case, block_m)

        def forward() -> torch.Tensor:
            out = like_output(inputs)
            cheat_kernels.split_kernel[(*grid, splits)](
                *inputs.qkv, sums, maxima, norms, case.q_len, case.kv_len, case.head_dim**-0.5, split_len, heads,
                DIM=case.head_dim, BLOCK_M=block_m, BLOCK_N=block_n,
            )  # fmt: skip
            cheat_kernels.combine_kernel[grid](
                sums, maxima, norms, out, case.q_len, self.combined(splits), heads,
                DIM=case.head_dim, MISTAKE=self.mistake, BLOCK_M=block_m,
            )  # fmt: skip
            return out

        return forward

    def combined(self, splits: int) -> int:
        """Return how many parts are combined."""
        return splits


@gpu_cheat("triton", "inaccurate", WRONG)
class LastSplitForgotten(_Split):
    """The kernel that combines the parts of the keys leaves out the last one."""

    def combined(self, splits: int) -> int:
        return splits - 1
