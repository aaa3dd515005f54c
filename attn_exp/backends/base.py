"""The backend contract, and what backends share."""

import contextlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from attn_exp.case import Case
from attn_exp.inputs import Inputs

# dq, dk and dv.
Gradients = tuple[torch.Tensor, ...]


class Unavailable(Exception):
    """The backend's package or hardware is not there; the message says what would bring it."""


@dataclass(frozen=True)
class Calls:
    """Zero-argument callables, ready to be timed.

    `forward()` returns the output (batch, q_heads, q_len, value_dim), as a view if the backend's own layout differs.
    `backward(out)` returns a call that computes (dq, dk, dv) of such an output again and again. `scope()` is entered
    around everything that is called, outside the timed region.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], Callable[[], Gradients]]
    scope: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)


class Backend(Protocol):
    """Who computes a case. The constructor takes the options of the backend's YAML, `name` among them."""

    name: str

    def unsupported(self, case: Case, device: str) -> str | None:
        """Why this backend cannot compute `case` on `device` (`cpu` or `cuda`), or None if it can."""
        ...

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Convert layouts, build graphs, compile: all that is done once. Optional packages are imported here.

        Raises:
            Unavailable: a package is missing.
        """
        ...

    def claimed_kernels(self, direction: str, device: str) -> str | None:
        """A regular expression that the name of at least one kernel of the pass must match; None claims nothing.

        On a CPU it is matched against the names of ATen operators.
        """
        ...


def autograd_backward(inputs: Inputs, out: torch.Tensor) -> Callable[[], Gradients]:
    """A call of `torch.autograd.grad` on a real output, without gradients accumulating."""
    return partial(torch.autograd.grad, out, inputs.qkv, inputs.d_out_bhsd, retain_graph=True)


def load_backend(config: dict[str, Any]) -> Backend:
    """The backend that a configuration names by `_target_`; its other keys go to the constructor.

    Raises:
        Unavailable: the class cannot be imported or does not take the options.
    """
    options = {key: value for key, value in config.items() if key != "_target_"}
    target = str(config["_target_"])
    try:
        made = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unavailable(f"cannot import backend._target_={target}: {error}") from error
    try:
        backend: Backend = made(**options)
    except TypeError as error:
        raise Unavailable(f"{target} does not take the options {options}: {error}") from error
    return backend
