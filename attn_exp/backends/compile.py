"""Run any backend's attention through torch.compile, and read what Dynamo did."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from attn_exp.attention.inputs import Function
from attn_exp.backends.base import Calls, calls_of
from attn_exp.backends.package import Refused
from attn_exp.core.errors import first_line, nearest
from attn_exp.core.record.record import CompileRecord
from attn_exp.core.record.request import Compile, Request

_LONGEST_REASON = 300
# The user's own settings when the process started.
_OWN_ALWAYS_COMPILE = os.environ.get("TRITON_ALWAYS_COMPILE", "0")
_OWN_DISABLED = bool(torch.compiler.config.force_disable_caches)
_OWN_TAG = str(torch.compiler.config.cache_key_tag)
_TRACING_ERROR = re.compile(r"got \w+\(['\"](.+?)['\"]\)\s*$", re.MULTILINE)


def compile_calls(calls: Calls, compile_: Compile) -> Calls:
    """Return the same calls with their attention compiled by Inductor. Compilation happens in the first calls.

    The attention that a block calls is compiled by itself, too. Raises Refused if the backend has no function of q, k
    and v, or repeated backwards would read overwritten memory.
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
    made = calls_of(compiled(calls.attention, compile_), inputs, calls.scope, calls.notes)
    # A path of its own for tracing is the one that is timed.
    alone = None if calls.alone is None else compiled(calls.alone, compile_)
    return replace(made, alone=alone, build_mask=calls.build_mask)


def _check_options(compile_: Compile) -> None:
    """Raise Refused for an unknown Inductor option. torch.compile's own error lists every option there is."""
    import torch._inductor

    known = torch._inductor.list_options()
    for name in compile_.options:
        if name not in known:
            near = nearest(name, known)
            raise Refused(f"Inductor has no option compile.options.{name}: {near}torch/_inductor/config.py has them")


def _options(compile_: Compile) -> dict[str, Any]:
    """Return the options of a mode together with the given ones. torch.compile accepts a mode or options, not both."""
    import torch._inductor

    return {**torch._inductor.list_mode_options(compile_.mode), **compile_.options}


def with_own_code(function: Function) -> Function:
    """Return a copy of a function with a code object of its own.

    Dynamo caches compilations per code object, and only a few for each. Without the copy, the second job or rival with
    the same code would count as a recompilation of the first.
    """

    def call(*operands: torch.Tensor) -> torch.Tensor:
        return function(*operands)

    call.__code__ = call.__code__.replace()
    return call


def compiled(function: Function, compile_: Compile) -> Function:
    """Compile a function of tensors with static shapes: a case has no other shapes."""
    call = with_own_code(function)
    options = _options(compile_)
    made: Function = torch.compile(call, fullgraph=compile_.fullgraph, dynamic=False, options=options or None)
    if not options.get("triton.cudagraphs"):
        return made

    def step(*operands: torch.Tensor) -> torch.Tensor:
        # The outputs live in the graph's memory pool. Marking a new step declares the previous outputs dead.
        torch.compiler.cudagraph_mark_step_begin()
        return made(*operands)

    return step


def reset_dynamo() -> None:
    """Reset Dynamo, whose caches hold few entries, so that earlier jobs do not fill them."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def reset_counters() -> None:
    """Reset the counters that `compile_record` reads. Compiled code is kept."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.utils.counters.clear()
        torch._dynamo.utils.clear_compilation_metrics()


def compile_record() -> CompileRecord | None:
    """Return what Dynamo did since `reset_counters`, or None if nothing was compiled."""
    if "torch._dynamo" not in sys.modules:
        return None
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    if not graphs:
        return None
    # A compile id is `frame/attempt`; the first attempt is 0.
    ids = {str(entry.compile_id) for entry in torch._dynamo.utils.get_compilation_metrics() if entry.compile_id}
    return CompileRecord(
        graphs=graphs,
        breaks={" ".join(reason.split())[:_LONGEST_REASON]: count for reason, count in counters["graph_break"].items()},
        recompilations=sum(not name.endswith("/0") for name in ids),
    )


def break_reason(error: Exception) -> str | None:
    """Return why Dynamo could not build a graph, if `error` says so; None otherwise."""
    if "torch._dynamo" not in sys.modules:
        return None
    if isinstance(error, torch._dynamo.exc.Unsupported):
        return f"fullgraph=true, and Dynamo would break the graph: {first_line(error)}"
    if isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        # The first line only says that an operator failed on fake tensors; the cause is at the end.
        cause = _TRACING_ERROR.search(str(error))
        return f"torch.compile cannot trace it: {cause[1] if cause else first_line(error)}"
    return None


@contextmanager
def without_recompiling(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a scope in which any recompilation is an error: a timed call must not compile."""
    with ExitStack() as stack:
        stack.enter_context(scope)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Return a scope in which compiled functions run as they were before: other shapes need no compiling."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    scope: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return scope


def use_caches(request: Request) -> None:
    """Let compilers read what earlier processes compiled for this backend, as the user's environment says, or nothing.

    Code that this process compiled stays cached either way. AOTAutograd's key lacks the backends that SDPA may choose
    (pytorch#185449; torch 2.11 and 2.13): without a tag, `flash` would run what `math` compiled before it.
    """
    # Inductor moves Triton's cache when it compiles, not when it finds what it needs in its own cache: without this a
    # kernel of Triton that is measured after `flex` would be compiled again by the next process.
    own = os.path.join(os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache")
    os.environ.setdefault("TRITON_CACHE_DIR", own)
    # Triton reads its variable at every compilation. PyTorch read its own before the first job arrived.
    os.environ["TRITON_ALWAYS_COMPILE"] = _OWN_ALWAYS_COMPILE if request.caches else "1"
    torch.compiler.config.force_disable_caches = not request.caches or _OWN_DISABLED
    options = json.dumps(dict(request.backend), sort_keys=True, default=repr)
    torch.compiler.config.cache_key_tag = f"{_OWN_TAG}{options}"
