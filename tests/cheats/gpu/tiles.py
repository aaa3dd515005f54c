"""Triton kernels with one mistake each, and right ones of odd styles; also run in Triton's interpreter on a CPU."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.core.case import Case
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


@gpu_cheat("triton", "inaccurate", WRONG, case=RAGGED)
class TailOfTheKeysUnmasked(Tiles):
    """The last block's keys beyond the end are zeros and are seen."""

    mistake = "tail"


@gpu_cheat("triton", "inaccurate", WRONG)
class ExponentOfAnotherBase(Tiles):
    """log2(e) is 1.44 in the kernel's exp2, which makes scores 0.19 % too small."""

    mistake = "constant"


@gpu_cheat("triton", "inaccurate", WRONG)
class WeightsInFp8(Tiles):
    """The weights are rounded to e4m3 before their product with v."""

    mistake = "fp8"


@gpu_cheat("triton", "inaccurate", WRONG)
class SumsNeverRescaled(Tiles):
    """A new maximum rescales the weights' sum, but not the output's."""

    mistake = "rescale"


@gpu_cheat("triton", "inaccurate", WRONG)
class SumsSeldomRescaled(Tiles):
    """The output's sums are rescaled only where the maximum rises by much."""

    mistake = "lazy"


@gpu_cheat("triton", "inaccurate", WRONG)
class ExponentsWithoutMaximum(Tiles):
    """No maximum is subtracted from the scores, which scores of standard deviation 1 do not show."""

    mistake = "maximum"


@gpu_cheat("triton", "inaccurate", WRONG, case=RAGGED_CAUSAL)
class DiagonalInSteps(Tiles):
    """The causal mask moves in steps of 16 keys."""

    mistake = "diagonal"


class _Chosen(Tiles):
    """Chooses its configuration by the case, as an autotuner's table does."""

    def make(self, case: Case, inputs: Inputs) -> Forward:
        """Return the launch of an autotuned kernel."""
        import cheat_kernels
        import triton

        block_m, block_n = self.blocks(case, inputs)
        configs = [
            triton.Config({"BLOCK_M": block_m, "BLOCK_N": size, "MISTAKE": mistake}, num_warps=4, num_stages=2)
            for size, mistake in ((block_n, ""), (block_n // 2, self.mistake))
        ]
        if not inputs.q_bhsd.is_cuda:
            # In the interpreter there is nothing to time: one configuration is not tuned.
            configs = self.pruned(configs, {"kv_len": case.kv_len})[:1]
        kernel = triton.autotune(
            configs,
            key=["q_len", "kv_len"],
            prune_configs_by={"early_config_prune": self.pruned},
        )(cheat_kernels.attention_kernel)

        def forward() -> torch.Tensor:
            out = like_output(inputs)
            kernel[lambda meta: self.grid(case, meta["BLOCK_M"])](
                *inputs.qkv, out, case.q_len, case.kv_len, case.head_dim**-0.5, DIM=case.head_dim, CAUSAL=case.causal
            )
            return out

        return forward

    def pruned(self, configs: list[Any], named: dict[str, Any], **more: Any) -> list[Any]:
        """Return the configurations to try: all."""
        return configs


@gpu_honest()
class TunedInTheFirstCalls(_Chosen):
    """Triton's autotuner tries two right configurations in the first call."""


@gpu_cheat("triton", "inaccurate", WRONG, case=RAGGED)
class TunedToAWrongConfiguration(_Chosen):
    """The autotuner's table has a configuration for some lengths that leaves out the mask of the last keys."""

    mistake = "tail"

    def pruned(self, configs: list[Any], named: dict[str, Any], **more: Any) -> list[Any]:
        return [config for config in configs if bool(config.kwargs["MISTAKE"]) == bool(named["kv_len"] % 32)]


class _Persistent(Tiles):
    """A fixed number of programs takes the blocks in turns."""

    programs = 100

    def make(self, case: Case, inputs: Inputs) -> Forward:
        """Return the launch."""
        import cheat_kernels

        block_m, block_n = self.blocks(case, inputs)
        tiles = -(-case.q_len // block_m) * case.batch * case.q_heads

        def forward() -> torch.Tensor:
            out = like_output(inputs)
            cheat_kernels.persistent_kernel[(min(self.programs, max(1, tiles - 1)),)](
                *inputs.qkv, out, case.q_len, case.kv_len, case.head_dim**-0.5, tiles,
                DIM=case.head_dim, CAUSAL=case.causal, MISTAKE=self.mistake, BLOCK_M=block_m, BLOCK_N=block_n,
            )  # fmt: skip
            return out

        return forward


@gpu_honest(case=CAUSAL)
class PersistentPrograms(_Persistent):
    """A persistent kernel: 100 programs take the blocks of queries in turns."""


@gpu_cheat("triton", "inaccurate", WRONG)
class PersistentWithoutTheLastRound(_Persistent):
    """A persistent kernel that leaves out the blocks after the last whole round."""

    mistake = "last"


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


@gpu_honest(case=RAGGED)
class SplitAndCombined(_Split):
    """The keys are split into four parts, whose float32 sums a second kernel combines."""


@gpu_cheat("triton", "inaccurate", WRONG)
class LastSplitForgotten(_Split):
    """The kernel that combines the parts of the keys leaves out the last one."""

    def combined(self, splits: int) -> int:
        return splits - 1


@gpu_cheat("triton", "inaccurate", WRONG)
class SplitsCombinedAsEquals(_Split):
    """The kernel that combines the parts of the keys takes their maxima for equal."""

    mistake = "equal"
