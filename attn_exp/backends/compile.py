"""Compilation: any backend's attention through torch.compile, and what Dynamo made of it."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from attn_exp.attention.autograd import Function
from attn_exp.backends.base import Calls, calls_of
from attn_exp.backends.package import Refused
from attn_exp.core.errors import first_line, nearest
from attn_exp.core.record import Compile, CompileRecord

_LONGEST_REASON = 300
# As the user's environment had them when the process began.
_OWN_ALWAYS_COMPILE = os.environ.get("TRITON_ALWAYS_COMPILE", "0")
_OWN_DISABLED = bool(torch.compiler.config.force_disable_caches)
_TRACING_ERROR = re.compile(r"got \w+\(['\"](.+?)['\"]\)\s*$", re.MULTILINE)


def compile_calls(calls: Calls, compile_: Compile) -> Calls:
    """The same calls with their attention compiled by Inductor; compiling itself happens in the first calls.

    Raises:
        Refused: the backend is no function of q, k and v that could be compiled, or its backward would run on memory
            that is gone.
    """
    inputs = calls.inputs
    if calls.attention is None or inputs is None:
        raise Refused("torch.compile needs a function of q, k and v, and this backend has none: set compile=none")
    _check_options(compile_)
    if _options(compile_).get("triton.cudagraphs") and inputs.leaves[0].requires_grad:
        raise Refused(
            "a compiled CUDA graph overwrites what its forward saved, so a backward cannot be called again and again: "
            "set passes=[forward], or compile=max-autotune-no-cudagraphs"
        )
    return calls_of(compiled(calls.attention, compile_), inputs, calls.scope, calls.notes)


def _check_options(compile_: Compile) -> None:
    """Raise Refused for an option that Inductor does not have, which torch.compile would answer with all it has."""
    import torch._inductor

    known = torch._inductor.list_options()
    for name in compile_.options:
        if name not in known:
            near = nearest(name, known)
            raise Refused(f"Inductor has no option compile.options.{name}: {near}torch/_inductor/config.py has them")


def _options(compile_: Compile) -> dict[str, Any]:
    """Inductor's options of a mode, and those that were given: torch.compile takes either, not both."""
    import torch._inductor

    return {**torch._inductor.list_mode_options(compile_.mode), **compile_.options}


def with_code_of_its_own(function: Function) -> Function:
    """The same function as one that shares no code with others.

    Dynamo keeps what it compiled with the code, a few to each, and what it compiles for the second job or rival of the
    same code counts as a recompilation of the first.
    """

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return function(*operands)

    call.__code__ = call.__code__.replace()
    return call


def compiled(function: Function, compile_: Compile) -> Function:
    """A compiled function of tensors; static shapes, since a case has no others."""
    call = with_code_of_its_own(function)
    options = _options(compile_)
    made: Function = torch.compile(call, fullgraph=compile_.fullgraph, dynamic=False, options=options or None)
    if not options.get("triton.cudagraphs"):
        return made

    def step(*operands: torch.Tensor) -> torch.Tensor:
        # Its outputs live in the graph's own memory; a new step says that the last ones are done with.
        torch.compiler.cudagraph_mark_step_begin()
        return made(*operands)

    return step


def forget() -> None:
    """Make Dynamo forget what earlier jobs compiled: its caches have few places."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def count_anew() -> None:
    """Begin what `found` tells: what was compiled before stays, and is not counted."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.utils.counters.clear()
        torch._dynamo.utils.clear_compilation_metrics()


def found() -> CompileRecord | None:
    """What Dynamo did since `count_anew`: graphs, breaks with their reasons, recompilations; None if nothing."""
    if "torch._dynamo" not in sys.modules:
        return None
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    if not graphs:
        return None
    # A compile id is `frame/attempt`: the first attempt is 0.
    ids = {str(entry.compile_id) for entry in torch._dynamo.utils.get_compilation_metrics() if entry.compile_id}
    return CompileRecord(
        graphs=graphs,
        breaks={" ".join(reason.split())[:_LONGEST_REASON]: count for reason, count in counters["graph_break"].items()},
        recompilations=sum(not name.endswith("/0") for name in ids),
    )


def break_reason(error: Exception) -> str | None:
    """Why Dynamo could make no graph of it, if that is what an exception says."""
    if "torch._dynamo" not in sys.modules:
        return None
    if isinstance(error, torch._dynamo.exc.Unsupported):
        return f"fullgraph=true, and Dynamo would break the graph: {first_line(error)}"
    if isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        # Its first line says that an operator failed on tensors without data; what failed stands at the end.
        told = _TRACING_ERROR.search(str(error))
        return f"torch.compile cannot trace it: {told[1] if told else first_line(error)}"
    return None


@contextmanager
def without_recompiling(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """A scope in which whatever Dynamo would compile anew is an error: a timed call must not compile."""
    with ExitStack() as stack:
        stack.enter_context(scope)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        yield


def use_caches(wanted: bool) -> None:
    """Let compilers read what earlier processes compiled, or not. What this process compiled, it keeps.

    If they may, then as the user's own environment says.
    """
    # Triton looks at its variable whenever it compiles; PyTorch has read its own before any job came.
    os.environ["TRITON_ALWAYS_COMPILE"] = _OWN_ALWAYS_COMPILE if wanted else "1"
    torch.compiler.config.force_disable_caches = not wanted or _OWN_DISABLED
