"""PyTorch's `scaled_dot_product_attention`, with its own choice of kernel or one of its backends forced."""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic as switches

from attn_exp.attention.formula import hidden_keys
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.scores import bias_tensor
from attn_exp.backends.base import FUSED_SHARE, Calls, Reproducible, calls_of
from attn_exp.backends.package import WrongOption
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import Case
from attn_exp.core.record.record import Kernel


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Let operators take deterministic algorithms inside, or raise if they have none, if that is wanted.

    Uninitialised memory is not filled, which PyTorch does then by default: its kernels would be in the time.
    """
    if not wanted:
        yield
        return
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    fills = switches.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    switches.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


# PyTorch's messages about backends that were not requested.
_OTHERS = re.compile(r"(not used because:|has been runtime disabled\.)$")
CHOICES = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Sdpa(Reproducible):
    """SDPA's own choice (`auto`): nothing is forced or claimed, and the record names the backend that ran."""

    supports = Supports(
        devices=("cuda", "cpu"), dtypes=("bfloat16", "float16", "float32"), align=("top_left",),
        features=("alibi", "bias", "latent"), value_dims="any",
    )  # fmt: skip

    def unsupported(self, case: Case, device: str) -> str | None:
        """Return what SDPA cannot express, else why PyTorch refuses, in its own words.

        SDPA aligns a causal mask top-left. A deterministic one is refused by backends that have none.
        """
        refusal = super().unsupported(case, device)
        if refusal is not None:
            return refusal
        with deterministic_algorithms(self.deterministic):
            return self._refusal(case, device)

    def _refusal(self, case: Case, device: str) -> str | None:
        """Return why PyTorch refuses the forced backend; None here, where none is forced."""
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the SDPA call; the choice of backend is forced around it, outside the timed call."""
        added = _added(case, inputs.q_bhsd.device)
        attention = partial(
            F.scaled_dot_product_attention,
            attn_mask=added,
            is_causal=added is None and not case.dense,
            enable_gqa=case.q_heads != case.kv_heads,
        )
        return calls_of(attention, inputs, self._scope)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with self._choice(), deterministic_algorithms(self.deterministic):
            yield

    def _choice(self) -> AbstractContextManager[Any]:
        # Not nullcontext: a choice made outside must not change SDPA's own.
        return sdpa_kernel(list(CHOICES.values()))

    def kernel_provider(self, direction: str, device: str, kernels: Sequence[Kernel]) -> str | None:
        """Return which of SDPA's backends these kernels belong to, or None."""
        for name, forced in _FORCED.items():
            claim = forced.claims.get((device, direction))
            if claim and any(re.search(claim, kernel.name) for kernel in kernels):
                return name
        return None


class Priority(Sdpa):
    """SDPA with an order of preference: it runs the first backend of `order` that can compute the case.

    Which one that is is known before, so that another one is the wrong kernel: PyTorch ignored the order.
    """

    claimed_share = FUSED_SHARE

    def __init__(self, name: str, order: Sequence[str]) -> None:
        super().__init__(name)
        unknown = [choice for choice in order if choice not in CHOICES]
        if unknown or not order:
            raise WrongOption(f"order={list(order)} must name some of {', '.join(CHOICES)}")
        self.order = [CHOICES[choice] for choice in order]
        self._names = tuple(order)
        self._first: Forced | None = None

    def _refusal(self, case: Case, device: str) -> str | None:
        """Return the reasons of all backends in the order, or that PyTorch would take another one before the first."""
        forced = [_FORCED[name](name) for name in self._names]
        reasons = [backend.unsupported(case, device) for backend in forced]
        usable = [backend for backend, reason in zip(forced, reasons, strict=True) if reason is None]
        if not usable:
            return "; ".join(reason for reason in reasons if reason)
        first = self._first = usable[0]
        if device == "cpu" and isinstance(first, Math) and any(isinstance(backend, Flash) for backend in usable):
            # select_sdp_backend_cpp of ATen has an order of its own (torch 2.11 and 2.13).
            return (
                f"{self.name}: PyTorch ignores the order on a CPU, where it takes flash before math: "
                "set backend.order=[math], or put flash first"
            )
        if isinstance(first, Math):
            # The claimed kernel is a signature, as where it is forced; under torch.compile kernels are generated.
            self.claimed_share, self.transparent = first.claimed_share, True  # type: ignore[misc]
        return None

    @property
    def expected_provider(self) -> str | None:
        """The backend whose kernels must run, once a case was asked for."""
        return None if self._first is None else self._first.name

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Return what the first backend of the order claims that can compute the case."""
        return None if self._first is None else self._first.claimed_kernels(direction, device)

    def _choice(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(self.order, set_priority=True)


class Forced(Sdpa):
    """One of SDPA's backends, forced."""

    choice: SDPBackend
    claimed_share = FUSED_SHARE

    def _choice(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(self.choice)


class Flash(Forced):
    """FlashAttention 2 as it ships with PyTorch; on a CPU PyTorch's own flash kernel."""

    supports = replace(Sdpa.supports, value_dims="equal", features=("alibi", "bias"))
    choice = SDPBackend.FLASH_ATTENTION
    claims = {
        ("cuda", "forward"): r"flash_fwd",
        ("cuda", "backward"): r"flash_bwd",
        ("cpu", "forward"): r"_scaled_dot_product_flash_attention_for_cpu$",
        ("cpu", "backward"): r"_scaled_dot_product_flash_attention_for_cpu_backward$",
    }

    def _refusal(self, case: Case, device: str) -> str | None:
        if device == "cpu":
            return None
        return _ask(can_use_flash_attention, SDPBackend.FLASH_ATTENTION, case)


class Efficient(Forced):
    """The memory-efficient attention that PyTorch adopted from xFormers (CUTLASS)."""

    supports = replace(Sdpa.supports, devices=("cuda",))
    choice = SDPBackend.EFFICIENT_ATTENTION
    claims = {("cuda", "forward"): r"fmha_cutlassF", ("cuda", "backward"): r"fmha_cutlassB"}

    def _refusal(self, case: Case, device: str) -> str | None:
        return _ask(can_use_efficient_attention, SDPBackend.EFFICIENT_ATTENTION, case)


class Cudnn(Forced):
    """cuDNN's fused attention, forced through SDPA."""

    supports = replace(Sdpa.supports, devices=("cuda",), dtypes=("bfloat16", "float16"))
    choice = SDPBackend.CUDNN_ATTENTION
    claims = {
        ("cuda", "forward"): r"cudnn.*(sdpa|flash|mha).*(fprop|fwd|forward)|cudnn_generated_fort_native_sdpa.*fprop",
        ("cuda", "backward"): r"cudnn.*(sdpa|flash|mha).*(bprop|bwd|backward)|cudnn_generated_fort_native_sdpa.*bprop",
    }

    def _refusal(self, case: Case, device: str) -> str | None:
        return _ask(can_use_cudnn_attention, SDPBackend.CUDNN_ATTENTION, case)


class Math(Forced):
    """SDPA's unfused formula: two matrix products and a softmax, every intermediate in memory."""

    choice = SDPBackend.MATH
    transparent = True
    # The claimed kernel is a signature, as in eager, with any share of the time.
    claimed_share = 0.0
    claims = {
        ("cuda", "forward"): r"(?i)softmax",
        ("cuda", "backward"): r"(?i)softmax",
        ("cpu", "forward"): r"_scaled_dot_product_attention_math",
        ("cpu", "backward"): r"_softmax_backward_data",
    }


class AtenCudnn(Cudnn):
    """cuDNN's fused attention through the ATen operator that SDPA calls, without SDPA's dispatch."""

    supports = replace(Cudnn.supports, features=("latent",))

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the operator's call; it saves the log-sum-exp if a backward will need it."""
        return calls_of(
            partial(_aten_cudnn, saves_lse=inputs.q_bhsd.requires_grad, causal=not case.dense), inputs, self._scope
        )


_FORCED: dict[str, type[Forced]] = {"cudnn": Cudnn, "flash": Flash, "efficient": Efficient, "math": Math}


def _aten_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, saves_lse: bool, causal: bool) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, saves_lse, 0.0, causal)[0]
    return out


def _added(case: Case, device: torch.device) -> torch.Tensor | None:
    """Return SDPA's `attn_mask` for ALiBi and biases, in which hidden keys have minus infinity; None without them."""
    added = bias_tensor(case, device, getattr(torch, case.dtype))
    if added is None or case.dense:
        return added
    return added.masked_fill_(hidden_keys(case, 0, case.q_len, device), float("-inf"))


def _ask(can_use: Any, choice: SDPBackend, case: Case) -> str | None:
    """Return PyTorch's reasons for refusing a case, in its own words.

    Tensors of the case's shapes are allocated and never read.
    """
    dtype: torch.dtype = getattr(torch, case.dtype)

    def empty(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.empty(case.batch, heads, length, dim, dtype=dtype, device="cuda", requires_grad=True)

    q = empty(case.q_heads, case.q_len, case.head_dim)
    k = empty(case.kv_heads, case.kv_len, case.head_dim)
    v = empty(case.kv_heads, case.kv_len, case.value_dim)
    grouped = case.q_heads != case.kv_heads
    added = _added(case, q.device)
    causal = added is None and not case.dense
    if can_use(SDPAParams(q, k, v, added, 0.0, causal, grouped), False):
        return None
    # Only the call reports its reasons as Python warnings; can_use_* prints them from C++ (torch 2.11).
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(choice):
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, enable_gqa=grouped)
        except RuntimeError as error:
            # "... (Triggered internally at <file>:<line>.)" locates the check in PyTorch; it gives no reason.
            reasons = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in caught]
            return " ".join(reason for reason in reasons if not _OTHERS.search(reason)) or str(error)
    return None
