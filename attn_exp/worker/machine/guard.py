"""The guard: clocks, events and the judge's own functions are after a backend's code what they were before it.

A table of objects is taken before the backend is loaded, and compared by identity after its code ran; functions also by
their code, so that neither `time.perf_counter = mine` nor `perf_counter.__code__ = mine.__code__` stays unseen. What a
backend in this process could still do is said in docs/limits.md.
"""

import builtins
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_exp.worker.machine.guarded import COMPUTING, FREE_BUILTINS, NAMES
from attn_exp.worker.stopped import Untrusted

# The folders of the worker's side: the parent of a command judges nothing.
_JUDGING = tuple(
    f"attn_exp.{folder}."
    for folder in ("core", "attention", "kernels", "backends", "timers", "workloads", "profilers", "worker")
)
_CALLABLES = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, type)
_CONSTANTS = (int, float, str, tuple, frozenset, re.Pattern, type(None))
_WRAPPERS = (staticmethod, classmethod, property, cached_property)
_MISSING = object()
# Bound now: a backend may replace the built-in one.
_look_up = getattr


@dataclass(frozen=True, slots=True)
class _Kept:
    """One attribute as it was: where it is looked up, its name for messages, and the object."""

    owner: Any
    name: str
    value: Any
    place: str


@dataclass(frozen=True)
class Guard:
    """What judging and timing depend on, as it was when the guard was made."""

    kept: tuple[_Kept, ...]
    functions: tuple[tuple[FunctionType, Any, Any, Any, str], ...]
    tables: tuple[tuple[dict[Any, Any], dict[Any, Any], str], ...]
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def snapshot(cls) -> "Guard":
        """Return the guard of what is there now. Make it before any code of a backend from elsewhere runs."""
        kept = [*_named(), *_builtins()]
        tables: dict[int, tuple[dict[Any, Any], dict[Any, Any], str]] = {}
        # In the order of the folders, of which each imports only those before it: where a table is made, it is first.
        for folder in _JUDGING:
            for name, module in sorted(sys.modules.items()):
                if name.startswith(folder) and isinstance(module, ModuleType):
                    kept += _of_module(module, name)
                    for key, value in vars(module).items():
                        # A user may add metrics.
                        if key.isupper() and type(value) is dict and key != "METRICS":
                            tables.setdefault(id(value), (value, dict(value), f"{name}.{key}"))
        functions: dict[int, tuple[FunctionType, Any, Any, Any, str]] = {}
        for one in kept:
            function = _function(one.value)
            if function is not None:
                # Under the table's name, where a module of the package has bound it too.
                known = (function, function.__code__, function.__defaults__, function.__kwdefaults__, one.place)
                functions.setdefault(id(function), known)
        return cls(tuple(kept), tuple(functions.values()), tuple(tables.values()), _state())

    def violation(self) -> str | None:
        """Return what is no longer as it was, such as `torch.cuda.Event.record was replaced`; None if all is."""
        for one in self.kept:
            if _look_up(one.owner, one.name, _MISSING) is not one.value and not _same(one):
                return f"{one.place} was replaced"
        for function, code, defaults, kwdefaults, place in self.functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return f"the code of {place} was replaced"
            if function.__kwdefaults__ is not kwdefaults:
                return f"the defaults of {place} were replaced"
        for table, before, place in self.tables:
            if table != before:
                return f"{place} was changed"
        return self._changed_state()

    def check(self, when: str) -> None:
        """Check that nothing was replaced.

        Args:
            when: the end of the sentence, such as `while the backend was loaded`.

        Raises:
            Untrusted: something was: no number from this process can be trusted.
        """
        found = self.violation()
        if found is not None:
            raise Untrusted("implausible", f"{found} {when}, so that no time or check of this process can be trusted")

    def _changed_state(self) -> str | None:
        for name, read in _STATE.items():
            now = read()
            if now is not self.state[name] and now != self.state[name]:
                return _SENTENCES[name](self.state[name], now)
        return None


def _same(one: _Kept) -> bool:
    """Whether an attribute that is made anew at each look is still the same one."""
    return isinstance(one.owner, type) and vars(one.owner).get(one.name, _MISSING) is one.value


def _named() -> Iterator[_Kept]:
    """Yield the names of the table. What a build of torch lacks is left out."""
    for place, names in NAMES.items():
        owner = _resolve(place)
        listed = _all_of(owner) if names == "*" else names.split()
        for name in listed if owner is not None else ():
            value = getattr(owner, name, _MISSING)
            if value is not _MISSING and getattr(owner, name) is value:
                yield _Kept(owner, name, value, f"{place}.{name}")
            elif value is not _MISSING and isinstance(owner, type) and name in vars(owner):
                yield _Kept(owner, name, vars(owner)[name], f"{place}.{name}")


def _all_of(owner: Any) -> list[str]:
    """Return the methods and properties that a class defines itself; `torch.cuda.graph` keeps a stream beside them."""
    return [name for name, value in vars(owner or object).items() if isinstance(value, (*_CALLABLES, *_WRAPPERS))]


def _resolve(place: str) -> Any:
    parts = place.split(".")
    found: Any = importlib.import_module(parts[0])
    for part in parts[1:]:
        found = getattr(found, part, None)
    return found


def _builtins() -> Iterator[_Kept]:
    for name, value in vars(builtins).items():
        if name not in FREE_BUILTINS and isinstance(value, _CALLABLES):
            yield _Kept(builtins, name, value, f"builtins.{name}")


def _of_module(module: ModuleType, name: str) -> Iterator[_Kept]:
    """Yield a module's functions, classes with what is in them, modules and constants; not what it stores in others."""
    for key, value in list(vars(module).items()):
        if key.startswith("__"):
            continue
        if isinstance(value, (*_CALLABLES, *_CONSTANTS, ModuleType)) or hasattr(value, "cache_info"):
            yield _Kept(module, key, value, f"{name}.{key}")
        if isinstance(value, type) and value.__module__ == name:
            for inner, attribute in vars(value).items():
                if isinstance(attribute, (*_CALLABLES, *_WRAPPERS)):
                    yield _Kept(value, inner, attribute, f"{name}.{key}.{inner}")


def _function(value: Any) -> FunctionType | None:
    """Return the Python function behind a method, a property or a wrapper."""
    for name in ("__func__", "fget", "func"):
        if isinstance(value, _WRAPPERS) and hasattr(value, name):
            value = getattr(value, name)
    value = getattr(value, "__wrapped__", value) if hasattr(value, "cache_info") else value
    return value if isinstance(value, FunctionType) else None


def _function_modes() -> list[str]:
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


def _dispatch_modes() -> list[str]:
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def _hooks() -> list[str]:
    hooks = {
        "forward hooks": modules._global_forward_hooks,
        "forward pre-hooks": modules._global_forward_pre_hooks,
        "backward hooks": modules._global_backward_hooks,
        "backward pre-hooks": modules._global_backward_pre_hooks,
    }
    return [name for name, there in hooks.items() if there]


def _operators() -> frozenset[str]:
    """Return PyTorch's operators of which Python code computes tensors with data; importing torch.func adds others."""
    return frozenset(one for one in torch.library._impls if one.endswith(COMPUTING) and one.startswith("aten/"))


def _state() -> dict[str, Any]:
    return {name: read() for name, read in _STATE.items()}


_STATE: dict[str, Callable[[], Any]] = {
    "trace": sys.gettrace,
    "profile": sys.getprofile,
    "functions": _function_modes,
    "dispatch": _dispatch_modes,
    "hooks": _hooks,
    "operators": _operators,
}
_SENTENCES: dict[str, Callable[[Any, Any], str]] = {
    "trace": lambda before, now: "sys.settrace was called",
    "profile": lambda before, now: "sys.setprofile was called",
    "functions": lambda before, now: f"a TorchFunctionMode ({', '.join(now) or 'none'}) was left active",
    "dispatch": lambda before, now: f"a TorchDispatchMode ({', '.join(now) or 'none'}) was left active",
    "hooks": lambda before, now: f"{', '.join(now) or 'no hooks'} of all modules were left",
    "operators": lambda before, now: f"the operator {', '.join(sorted(now ^ before)[:2])} was replaced",
}
