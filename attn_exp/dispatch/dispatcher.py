"""The drop-in: SDPA's arguments, and for each shape the backend that a table picks.

A call finds its choice by one look-up in a dict. Under torch.compile the look-up happens while Dynamo traces, so that
the choice is part of the graph, and of the key of compilers' caches. `sdpa_kernel` is traced into nodes that name the
backends (torch/_dynamo/variables/ctx_manager.py, SDPAKernelVariable). The other backends are operators.
"""

import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.base import Backend, load_backend
from attn_exp.backends.sdpa import Forced, Priority, Sdpa
from attn_exp.core.case.case import Case
from attn_exp.core.dispatch_table import MODES, Choice, Chooser, DispatchTable, Mode
from attn_exp.core.errors import UserError

# PyTorch's own function, also while a dispatcher is in its place.
_SDPA = F.scaled_dot_product_attention
# Bound once: each name that is looked up in a module takes as long as a call of it.
_autocasts, _records = torch.is_autocast_enabled, torch.is_grad_enabled
_is_traced = torch.compiler.is_dynamo_compiling
_get_flash: Callable[[], bool] = torch.backends.cuda.flash_sdp_enabled
_set_flash: Callable[[bool], None] = torch.backends.cuda.enable_flash_sdp
_get_order, _set_order = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
# Backends after a pick that refuses: nothing is as slow as the unfused formula, and it is last.
_FALLBACKS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# How Dynamo is told that the choice is SDPA's own, or an order of its backends.
_DEFAULT, _ORDER = "default", "order"
# Shapes of which the choice is kept; then all are forgotten, so that endless new lengths fill no memory.
_MOST_KEPT = 1 << 14
# Choices for lengths that were not measured are made for eight steps an octave.
_STEPS = 4


@dataclass(frozen=True, slots=True)
class _Call:
    """How to call a backend: SDPA with an order of its backends, a function in their place, or SDPA as it is.

    `name` names the call for Dynamo, which traces constants, and `flash` is whether PyTorch's flash kernel is in the
    order.
    """

    name: str = _DEFAULT
    order: tuple[SDPBackend, ...] = ()
    numbers: list[int] = field(default_factory=list)
    flash: bool = True
    function: Callable[..., torch.Tensor] | None = None


class Dispatcher(AbstractContextManager["Dispatcher"]):
    """Calls the backend that a dispatch table picks for a shape.

    If the table has no choice (a mask tensor, dropout, another device or dtype), PyTorch chooses as without it.

    Args:
        table: as `attn_exp.dispatch.load` reads it.
        usable: the labels of its backends that can be called here.
    """

    def __init__(self, table: DispatchTable, usable: Sequence[str]) -> None:
        self.table = table
        self._chooser = Chooser(table, usable)
        self._usable = tuple(usable)
        self._device = table.fingerprint["device"]
        self._on_gpu = self._device == "cuda"
        self._layouts = len({bucket.case.layout for bucket in table.buckets}) > 1
        self._lengths = {(bucket.case.q_len, bucket.case.kv_len) for bucket in table.buckets}
        self._calls: dict[Any, _Call] = {}
        self._steps: dict[Any, Choice] = {}
        self._backends: dict[str, Backend] = {}
        # Orders and functions by name. An attribute that is added changes nothing that Dynamo guards earlier graphs by.
        self._traceable = SimpleNamespace()
        self._warned: set[tuple[str, ...]] = set()
        self._replaced: list[Any] = []
        if self._on_gpu:
            # PyTorch sets its own order, cuDNN first on Hopper, when it first chooses; it would replace ours then.
            tensor = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(tensor, tensor, tensor)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute scaled dot-product attention, with the arguments and the result of PyTorch's function.

        Args:
            query: (batch, q_heads, q_len, head_dim).
            key: (batch, kv_heads, kv_len, head_dim).
            value: (batch, kv_heads, kv_len, value_dim).
            attn_mask: a mask; PyTorch chooses the backend then.
            dropout_p: the probability of dropout; PyTorch chooses the backend if it is not 0.
            is_causal: a causal mask, aligned top-left.
            scale: the factor of the scores; None is head_dim ** -0.5.
            enable_gqa: whether there may be fewer key-value heads than query heads.

        Returns:
            (batch, q_heads, q_len, value_dim).
        """
        here = query.is_cuda if self._on_gpu else query.is_cpu
        if attn_mask is not None or dropout_p != 0.0 or not here or type(query) is not torch.Tensor:
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if _autocasts(self._device):
            # Autocast does this to SDPA's arguments, but not to those of a function in its place.
            dtype = torch.get_autocast_dtype(self._device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        trains = _records() and (query.requires_grad or key.requires_grad or value.requires_grad)
        heads_inside = self._layouts and query.stride(1) < query.stride(2)
        if _is_traced():
            return self._traced(query, key, value, trains, heads_inside, is_causal, scale, enable_gqa)
        seen = (query.shape, key.shape, value.shape, query.dtype, trains, heads_inside, is_causal, scale, enable_gqa)
        call = self._calls.get(seen)
        if call is None:
            call = self._find(seen)
        if call.function is not None:
            return call.function(query, key, value)
        if not call.order:
            return _SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if self._on_gpu:
            # This is the part of sdpa_kernel that is needed: all of it takes 15 us, this 0.2.
            before = _get_order()
            _set_order(call.numbers)
            try:
                return _SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
            finally:
                _set_order(before)
        # On a CPU PyTorch heeds no order, only what is switched off.
        flash = _get_flash()
        _set_flash(flash and call.flash)
        try:
            return _SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        finally:
            _set_flash(flash)

    def choice(self, mode: Mode = "inference", **sizes: Any) -> Choice:
        """Return what is called for a shape, and why: the measured or nearest shape, and where it extrapolates.

        Args:
            mode: `inference` or `training`.
            **sizes: fields of `Case`: `batch`, `q_heads`, `q_len`, `head_dim`, `dtype`, and where they differ
                `kv_heads`, `kv_len`, `value_dim`; `causal`, `layout`.

        Raises:
            UserError: the shape is impossible, or a name is no field.
        """
        if mode not in MODES:
            raise UserError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        fields = {"kv_heads": sizes.get("q_heads"), "kv_len": sizes.get("q_len"), "value_dim": sizes.get("head_dim")}
        try:
            case = Case(**{"align": "top_left", **fields, **sizes})
        except TypeError as error:
            complaint = str(error).partition(" ")[2]
            raise UserError(f"a shape {complaint}: give batch, q_heads, q_len, head_dim and dtype") from error
        return self._chooser.choice(case, mode)

    def register(self, name: str = "attn_exp") -> str:
        """Give the attention to transformers, for `from_pretrained(..., attn_implementation=NAME)`; return the name.

        Raises UserError if transformers is not installed, or too old for an AttentionInterface.
        """
        from attn_exp.dispatch.transformers import register

        return register(self.attention, name)

    def __enter__(self) -> Self:
        """Put `attention` in the place of `torch.nn.functional.scaled_dot_product_attention`.

        Code that imported PyTorch's function by its name keeps that one.
        """
        self._replaced.append(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = self.attention
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        F.scaled_dot_product_attention = self._replaced.pop()

    def _traced(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, trains: bool, heads_inside: bool,
        is_causal: bool, scale: float | None, enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Do the same as `attention` in the words that Dynamo traces."""
        # The index of a size that Dynamo holds as a symbol is its number, by which the graph is guarded.
        shapes = [tuple([operator.index(size) for size in tensor.shape]) for tensor in (query, key, value)]
        name = self._name(*shapes, query.dtype, trains, heads_inside, is_causal, scale, enable_gqa)
        if name == _DEFAULT:
            return _SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if name.startswith(_ORDER):
            with sdpa_kernel(getattr(self._traceable, name), set_priority=True):
                return _SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        made: torch.Tensor = getattr(self._traceable, name)(query, key, value)
        return made

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _name(self, *seen: Any) -> str:
        """Return the name of the call for a shape. Dynamo calls this while it traces and keeps the result."""
        call = self._calls.get(seen)
        return (self._find(seen) if call is None else call).name

    def _find(self, seen: tuple[Any, ...]) -> _Call:
        """Make and keep the call for shapes and other arguments that `attention` has not seen before."""
        if len(self._calls) > _MOST_KEPT:
            self._calls.clear()
            self._steps.clear()
        step = self._step(seen)
        choice = self._steps.get(step)
        if choice is None and (case := _case(seen)) is not None:
            choice = self._steps[step] = self._chooser.choice(case, "training" if seen[4] else "inference")
            if choice.beyond:
                self._warn(case, choice)
        call = self._calls[seen] = _Call() if choice is None else self._call(choice, seen)
        return call

    def _step(self, seen: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what was seen with lengths that were not measured rounded up to an eighth octave.

        A choice between measured shapes takes milliseconds. Rounded up, a step ends where a tile does.
        """
        q, k, v, *rest = seen
        if not len(q) == len(k) == len(v) == 4 or (q[2], k[2]) in self._lengths:
            return seen
        return "step", *((*sizes[:2], _stepped(sizes[2]), sizes[3]) for sizes in (q, k, v)), *rest

    def _call(self, choice: Choice, seen: tuple[Any, ...]) -> _Call:
        """Return how to call what is chosen, or the first after it that can compute the shape."""
        for label in self._ordered(choice):
            if label not in self._backends:
                self._backends[label] = load_backend(self.table.backends[label])
            backend = self._backends[label]
            if isinstance(backend, Forced | Priority):
                return self._order((backend.choice,) if isinstance(backend, Forced) else backend.order)
            if isinstance(backend, Sdpa):
                return _Call()
            # In decoding each length is new, and only functions need its case.
            case, scale = _case(seen), seen[7]
            if case is None or scale not in (None, case.head_dim**-0.5):
                continue
            if backend.unsupported(case, self._device) is None:
                return self._function(backend, case, "training" if seen[4] else "inference")
        return _Call()

    def _ordered(self, choice: Choice) -> list[str]:
        """Return the chosen label, and then the others of its bucket, the fastest first."""
        times = choice.bucket.times_us if choice.bucket is not None else {}
        slower = sorted((label for label in times if label in self._usable), key=lambda label: times[label])
        return list(dict.fromkeys([label for label in (choice.label, *slower) if label is not None]))

    def _order(self, first: Sequence[SDPBackend]) -> _Call:
        """Return SDPA with an order of its backends; those behind the first are for shapes that it refuses."""
        rest = (SDPBackend.MATH,) if self._device == "cpu" else _FALLBACKS
        order = list(dict.fromkeys((*first, *rest)))
        name = "_".join([_ORDER, *(choice.name for choice in order)])
        setattr(self._traceable, name, order)
        numbers = [int(choice) for choice in order]
        return _Call(name=name, order=tuple(order), numbers=numbers, flash=SDPBackend.FLASH_ATTENTION in order)

    def _function(self, backend: Backend, case: Case, mode: Mode) -> _Call:
        """Prepare a backend for a shape, as a job does: some build masks or plans that belong to it."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if self._on_gpu else []):
            inputs = make_inputs(case, self._device, 0, with_gradients=mode == "training")
            function = backend.prepare(case, inputs).attention
        if function is None:
            return _Call()
        name = f"function_{len(vars(self._traceable))}"
        setattr(self._traceable, name, function)
        return _Call(name=name, function=function)

    def _warn(self, case: Case, choice: Choice) -> None:
        """Say once of each way to lie beyond the measured shapes what is called."""
        ways = tuple(way.rpartition(" (")[0].rpartition(" ")[0] for way in choice.beyond)
        if ways not in self._warned:
            self._warned.add(ways)
            warnings.warn(f"{case.label()} is {choice.why}; {choice.label} is called", stacklevel=2)


def _case(seen: tuple[Any, ...]) -> Case | None:
    """Return the case of a call; None for shapes that are none, of which SDPA itself says what is wrong."""
    q, k, v, dtype, _, heads_inside, is_causal, _, enable_gqa = seen
    if not len(q) == len(k) == len(v) == 4 or not q[0] == k[0] == v[0] or k[1:3] != v[1:3] or q[3] != k[3]:
        return None
    if q[1] != k[1] and not enable_gqa:
        return None
    try:
        return Case(
            batch=q[0], q_heads=q[1], kv_heads=k[1], q_len=q[2], kv_len=k[2], head_dim=q[3], value_dim=v[3],
            dtype=str(dtype).removeprefix("torch."), causal=is_causal, align="top_left",
            layout="bshd" if heads_inside else "bhsd",
        )  # fmt: skip
    except UserError:
        return None


def _stepped(length: int) -> int:
    """Return a length rounded up to one of eight an octave."""
    shift = max(0, (length - 1).bit_length() - _STEPS)
    return -(-length >> shift) << shift
