"""What the entries for GPUs share: cases, words, and FlashAttention through SDPA with a hook for one forward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.attention.inputs import Gradients, Inputs, autograd_backward
from attn_exp.backends.base import Calls
from attn_exp.core.case.case import E4M3, Case
from cheats.corpus import FORWARD, Decorator, cheat, honest

# Small, so that a job and its float32 reference take little time; large enough that a call is not only its launch.
DENSE = Case(
    batch=4, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype="bfloat16"
)  # fmt: skip
CAUSAL = replace(DENSE, causal=True)
RAGGED = replace(DENSE, q_len=1000, kv_len=1000)
CAPPED = replace(DENSE, softcap=50.0)
SHORT = replace(DENSE, q_len=256, kv_len=256)
CODES = replace(DENSE, batch=2, q_heads=4, kv_heads=4, dtype=E4M3)

# What a reason says of a result that is wrong, of work that nobody waits for, of functions that were replaced.
WRONG = r"\b(out|dq|dk|dv)\b"
UNAWAITED = r"stream|wait|above the|faster than|\bout\b"
CLAIM = r"claims"
NOTHING = r"ran no kernel at all"

Forward = Callable[[], torch.Tensor]


def any_of(*words: str) -> str:
    """Return a regular expression that one of several matches."""
    return "|".join(f"(?:{word})" for word in words)


def gpu_cheat(group: str, status: str | tuple[str, ...], words: str, **more: Any) -> Decorator:
    """Register a cheat on a GPU; by default its forward on the dense case."""
    return cheat(group, status, words, **{"device": "cuda", "case": DENSE, "passes": FORWARD, **more})


def gpu_honest(**more: Any) -> Decorator:
    """Register an odd but honest backend on a GPU; by default its forward on the dense case."""
    return honest(**{"device": "cuda", "case": DENSE, "passes": FORWARD, **more})


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return SDPA's output; it knows no softcap, no window, and a causal mask of squares only."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=case.causal, enable_gqa=q.shape[1] != k.shape[1], **options
    )  # fmt: skip


def batches(case: Case, tensors: tuple[torch.Tensor, ...], first: int, last: int) -> tuple[torch.Tensor, ...]:
    """Return the rows first to last of the batch of each tensor, as views."""
    return tuple(tensor[first:last] for tensor in tensors)


def like_output(inputs: Inputs) -> torch.Tensor:
    """Return an empty output."""
    return torch.empty_like(inputs.d_out_bhsd)


class OnGpu:
    """SDPA's FlashAttention; subclasses change `make`, `attention`, `gradients` or `prepare`."""

    # What it claims of both passes.
    claim: ClassVar[str | None] = None

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported(self, case: Case, device: str) -> str | None:
        """Refuse nothing."""
        return None

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Claim what the class says, on a GPU."""
        return self.claim if device == "cuda" else None

    def attention(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute the output from q, k and v, differentiably."""
        return attend(case, q, k, v)

    def make(self, case: Case, inputs: Inputs) -> Forward:
        """Return the forward call."""
        return lambda: self.attention(case, *inputs.qkv)

    def gradients(self, case: Case, inputs: Inputs, right: Callable[[], Gradients]) -> Callable[[], Gradients]:
        """Return the backward call; `right` is the honest one."""
        return right

    def scope(self) -> AbstractContextManager[Any]:
        """Force FlashAttention, where there is one."""
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the calls."""
        with self.scope():
            forward = self.make(case, inputs)

        def backward(out: torch.Tensor) -> Callable[[], Gradients]:
            return self.gradients(case, inputs, autograd_backward(inputs, out))

        return Calls(forward, backward, scope=self.scope, inputs=inputs)


class Formula(OnGpu):
    """The formula in the case's dtype, written out."""

    def scope(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()
