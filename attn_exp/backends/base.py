"""The contract that every backend fulfils, and what backends share."""

import contextlib
import inspect
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

from attn_exp.attention.inputs import DifferentiableInputs, Function, Gradients, Inputs, autograd_backward
from attn_exp.backends.package import Package, Unavailable, WrongOption
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import HALVES, Case


@dataclass(frozen=True)
class Calls:
    """Zero-argument callables, ready to be timed.

    Attributes:
        forward: returns the output (batch, q_heads, q_len, value_dim), as a view if the backend's layout differs.
        backward: takes such an output and returns a call that computes (dq, dk, dv) repeatedly.
        scope: a context manager that is entered around all calls, outside the timed region.
        attention: `forward` as a function of q, k and v, for `torch.compile` and for blocks; None if there is no such
            function. A block's calls have the block here.
        alone: the attention that a block calls, as a function of q, k and v; None for calls without a block.
        inputs: the tensors that the calls read, in the backend's layout. They change in place between timed calls; None
            if these are the inputs that were given.
        notes: figures for the record: preparation times, workspace bytes.
        build_mask: builds the mask's data anew, as `prepare` did before any call; None if the mask is arguments.
        scales: the factors of `out`, `dq`, `dk` and `dv` if these are codes. A pass that is built in its first call
            adds its factors then.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], Callable[[], Gradients]]
    scope: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)
    attention: Function | None = None
    alone: Function | None = None
    inputs: DifferentiableInputs | None = None
    notes: dict[str, float] = field(default_factory=dict)
    build_mask: Callable[[], object] | None = None
    scales: dict[str, float] = field(default_factory=dict)


class Backend(Protocol):
    """A backend computes a case. The constructor takes the options of the backend's YAML, `name` among them."""

    name: str

    def unsupported(self, case: Case, device: str) -> str | None:
        """Return why this backend cannot compute `case` on `device` (`cpu` or `cuda`), or None if it can."""
        ...

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Do everything that is done once: convert layouts, build graphs, compile. Import optional packages here.

        Raises Unavailable if a package is missing.
        """
        ...

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Return a regular expression of the pass's main kernels; None claims nothing.

        The kernels that it matches must take a share of the time of all: `claimed_share` of the backend, 0.5 if it has
        no such attribute. On a CPU ATen operators take the place of kernels.
        """
        ...


# Half of the time: what a fused attention's own kernels take at least, beside copies, fills and sums around them.
CLAIMED_SHARE = 0.5
# The same for libraries that pad head dimensions at each call, or whose backward has kernels of other names for row
# sums, conversions and sums over grouped heads. In the smallest cases these take as long as the main kernel.
FUSED_SHARE = 0.25
NO_FUNCTION = "a block needs a function of q, k and v, and this backend has none: set workload=attention"


class DeclarativeBackend:
    """A backend that declares what it supports, the package that it needs, and the kernels that it claims.

    `claims` maps (device, pass) to a pattern as `Backend.claimed_kernels` returns it.
    """

    supports: ClassVar[Supports]
    package: ClassVar[Package | None] = None
    claims: ClassVar[dict[tuple[str, str], str]] = {}
    # The least share of a pass's kernel time that the claimed kernels take, in an attention without a block around it.
    claimed_share: ClassVar[float] = CLAIMED_SHARE
    # Whether torch.compile traces into it and generates other kernels than it claims.
    transparent: ClassVar[bool] = False
    # Whether Triton compiles its kernels, so that profilers know their source lines.
    generates_triton: ClassVar[bool] = False
    # Whether `prepare` makes a function of q, k and v, which a block or torch.compile can call.
    a_function: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported(self, case: Case, device: str) -> str | None:
        """Return what `supports` refuses, and on a GPU what its compute capability rules out, in one sentence."""
        refusal = self.supports.refusal(case, device)
        if refusal is None and device == "cuda":
            refusal = self.supports.capability_refusal(torch.cuda.get_device_capability())
        if refusal is None and case.workload is not None and not self.a_function:
            return f"{self.name}: {NO_FUNCTION}"
        return f"{self.name} {refusal}" if refusal else None

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """Return the pattern of the pass's main kernel, or operator on a CPU."""
        return self.claims.get((device, direction))


class Reproducible(DeclarativeBackend):
    """A backend that is asked by an option for a backward that sums in a fixed order."""

    def __init__(self, name: str, deterministic: bool = False) -> None:
        super().__init__(name)
        self.deterministic = deterministic


def calls_of(
    attention: Function,
    inputs: DifferentiableInputs,
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    notes: dict[str, float] | None = None,
) -> Calls:
    """Return the calls of a differentiable function of the inputs' operands; autograd computes the backward."""
    return Calls(
        forward=partial(attention, *inputs.operands),
        backward=partial(autograd_backward, inputs),
        scope=scope,
        attention=attention,
        inputs=inputs,
        notes=notes or {},
    )


def from_pages(attention: Function, inputs: Inputs) -> Function:
    """Return a function of pools, which copies keys and values out of the pools in each call; itself without pages."""
    paging = inputs.paging
    if paging is None:
        return attention

    def of_pools(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = paging.read(k)
        return attention(q, keys, keys[..., : v.shape[-1]] if inputs.latent else paging.read(v))

    return of_pools


def step(calls: Calls) -> tuple[torch.Tensor, ...]:
    """Make a forward and its backward, as a training step does; return the output and the gradients."""
    out = calls.forward()
    return out, *calls.backward(out)()


def supported_passes(backend: Backend, case: Case) -> tuple[str, ...]:
    """Return the passes of a case that a backend supports; both if it declares nothing."""
    if case.forward_only is not None:
        return ("forward",)
    supports = getattr(backend, "supports", None)
    return supports.passes_at(case.dtype) if isinstance(supports, Supports) else HALVES


def load_backend(config: dict[str, Any]) -> Backend:
    """Return the backend that a configuration names by `_target_`, made with its other keys except `about`.

    Raises Unavailable if the class cannot be imported or does not take the options.
    """
    backend: Backend = made_from("backend", {key: value for key, value in config.items() if key != "about"})
    return backend


def made_from(key: str, config: dict[str, Any]) -> Any:
    """Return the object that the node `key` of a configuration names by `_target_`, made with its other keys.

    Raises Unavailable if the class cannot be imported or does not take the options.
    """
    options = {name: value for name, value in config.items() if name != "_target_"}
    target = str(config["_target_"])
    try:
        made = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unavailable(f"cannot import {key}._target_={target}: {error}") from error
    refusal = f"{target} does not take the options {options}"
    try:
        inspect.signature(made).bind(**options)
    except (TypeError, ValueError) as error:
        raise Unavailable(f"{refusal}: {error}") from error
    try:
        return made(**options)
    except WrongOption as error:
        raise Unavailable(f"{refusal}: {error}") from error
