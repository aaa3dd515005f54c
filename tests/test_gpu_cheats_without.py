"""The corpus for GPUs, as far as it can be tried without one: the arithmetic on a CPU, the kernels in the interpreter.

Streams, events and graphs are replaced by ones that do everything at once. A cheat must then be wrong on some changed
input, or on hard ones; an honest backend right on all of them.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cheats.corpus import Entry, load
from cheats.ways import restore

from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.attention.reference import reference
from attn_exp.backends.base import load_backend
from attn_exp.core.case import Case

ENTRIES = [entry for entry in load() if entry.device == "cuda"]
TILES = [entry for entry in ENTRIES if ".tiles." in entry.target]
# Their mistakes are not in their numbers: other kernels, clocks, streams that are not waited for.
RIGHT_NUMBERS = {"kernels", "clock", "streams"}
# Wrong all the same, without a GPU.
WRONG_ANYWAY = {"TailInTheFlush", "LaunchedByAThreadLater"}
# Right unless another forward comes before the backward.
RIGHT_WITHOUT_ANOTHER_FORWARD = {"SavedByHand"}
# A thread may be done or not.
UNCERTAIN = {"ComputedByAThread"}
# Triton, the compiler, another process.
NOT_HERE = {"NamedAsTheClaim", "CompiledByItself", "CudagraphTrees"}
TRIED = [entry for entry in ENTRIES if entry not in TILES and not entry.worker and entry.name not in NOT_HERE]
# More than the calls in which the last of them is honest.
CALLS = 10


def small(entry: Entry) -> Case:
    """Return the entry's case with few tokens and heads, in float32 if it is in bfloat16."""
    case = entry.case
    tokens = 128 - (1024 - case.q_len if case.q_len > 256 else 0)
    heads = {"q_heads": 4, "kv_heads": 4 if case.kv_heads == case.q_heads else 2, "q_len": tokens, "kv_len": tokens}
    dtype = "float32" if case.dtype == "bfloat16" else case.dtype
    return replace(case, **heads, head_dim=32, value_dim=32, dtype=dtype)


class _Stream:
    """A stream in which everything is done at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def query(self) -> bool:
        return False


class _Event(_Stream):
    """An event of such a stream."""

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 1.0


class _Graph:
    """A graph whose replay calls again."""

    def __init__(self, run: Any, out: torch.Tensor) -> None:
        self.run, self.out = run, out

    def replay(self) -> None:
        self.out.copy_(self.run())


def _captured(run: Any) -> tuple[_Graph, torch.Tensor]:
    out = run().clone()
    return _Graph(run, out), out


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """One thread: for so few numbers, several wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """CUDA without a device; the list says whether a graph is captured."""
    from attn_exp.timers.gpu import Cuda

    state = [False]
    made = object.__new__(Cuda)
    made._flush_sums = torch.ones(4)
    for name, value in {
        "Stream": _Stream, "Event": _Event, "current_stream": _Stream, "stream": lambda _: nullcontext(),
        "synchronize": lambda device=None: None, "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: state[0],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    for module in ("graphs", "right"):
        monkeypatch.setattr(f"cheats.gpu.{module}.captured", _captured)
    state.append(made)  # type: ignore[arg-type]
    return state


def changed(known: Inputs, named: Any, names: str, seed: int, hard: bool) -> None:
    """Flip signs of channels in place, in the judge's own tensors and in those that the backend names.

    If `hard`, make scores deeply negative and large in both.
    """
    draw = torch.Generator().manual_seed(seed)
    for name, own, other in zip("qkvd", (*known.qkv, known.d_out), (*named.qkv, named.d_out), strict=True):
        if name not in names:
            continue
        signs = torch.where(torch.rand(own.shape[-1], generator=draw) < 0.5, -1.0, 1.0)
        for tensor in (own, other):
            now = tensor.detach().float() * signs
            if hard and name == "q":
                now = now * 6
                now[:, :, 5] = 0
                now[:, :, 5, 0] = -24 * now.shape[-1] ** 0.5
            if hard and name == "k":
                now[..., 0] = 8
            tensor.data.copy_(now.to(tensor.dtype))


def copied(inputs: Inputs) -> Inputs:
    """Return tensors of the judge's own."""
    q, k, v, d_out = (tensor.detach().clone() for tensor in (*inputs.qkv, inputs.d_out))
    for tensor in (q, k, v):
        tensor.requires_grad_(inputs.q_bhsd.requires_grad)
    return Inputs(q, k, v, d_out, inputs.scales)


def trial(entry: Entry, case: Case, state: list[Any]) -> list[float]:
    """Return the errors of all results of an entry, infinite where the result cannot be judged at all."""
    backward = "backward" in entry.passes
    inputs = make_inputs(case, "cpu", 3, with_gradients=backward)
    known, found = copied(inputs), []
    calls = load_backend({"_target_": entry.target, "name": "tried", **entry.options}).prepare(case, inputs)
    named = calls.inputs or inputs
    for index in range(CALLS):
        hard = index == CALLS - 1 and not case.quantised
        if index:
            changed(known, named, "qkvd", index, hard)
        if len(state) > 1:
            state[1]._flush_sums.fill_(1)
        state[0] = entry.timer == "graph" and index > 0
        tensors = {}
        try:
            with calls.scope():
                # Copied outside of the scope, where no mode of the backend sees it.
                out = calls.forward()
                run = calls.backward(out) if backward else None
            tensors["out"] = out if type(out) is not torch.Tensor else out.detach().clone()
            for again in range(2) if run is not None else ():
                if again:
                    changed(known, named, "d", 100 + index, False)
                with calls.scope():
                    tensors |= dict(zip(("dq", "dk", "dv"), run(), strict=True))
        except RuntimeError:
            # Raising is what some of them must do; any other error is a mistake of the corpus.
            if entry.group not in ("bad input", "inputs"):
                raise
            found.append(float("inf"))
            continue
        right = reference(case, known, with_gradients=backward)
        found += [_error(tensor, right[name], calls.scales.get(name, 1.0)) for name, tensor in tensors.items()]
    return found


def _error(tensor: torch.Tensor, right: torch.Tensor, scale: float) -> float:
    if type(tensor) is not torch.Tensor or tensor.shape != right.shape:
        return float("inf")
    # Relative to the row, or to a tenth of a usual one: gradients of a query that sees one key almost vanish.
    norms = right.norm(dim=-1)
    rows = (tensor.detach().float() * scale - right).norm(dim=-1) / norms.maximum(norms.median() / 10)
    return float("inf") if not rows.isfinite().all() else rows.max().item()


def limit_of(case: Case) -> float:
    """Return the error of a row that no honest computation exceeds."""
    return 0.045 if case.quantised else 5e-4


@pytest.mark.parametrize("entry", TRIED, ids=lambda entry: entry.name)
def test_its_arithmetic_is_right_or_wrong_as_it_says(entry: Entry, capturing: list[Any]) -> None:
    case = small(entry)
    try:
        worst = max(trial(entry, case, capturing))
    finally:
        restore()
    wrong = entry.statuses != ("ok",) and (entry.group not in RIGHT_NUMBERS or entry.name in WRONG_ANYWAY)
    wrong = wrong and entry.name not in RIGHT_WITHOUT_ANOTHER_FORWARD
    if entry.name not in UNCERTAIN:
        assert (worst > limit_of(case)) == wrong, f"{entry.name}: {worst}"


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _start() -> None:
    import triton_interpreter

    triton_interpreter.repair()
    torch.set_num_threads(1)


def _interpreted(entry: Entry) -> float:
    global CALLS
    CALLS = 3
    tokens = 64 if entry.case.q_len == 1024 else 72
    case = replace(small(entry), batch=1, q_heads=2, kv_heads=2, q_len=tokens, kv_len=tokens, head_dim=16, value_dim=16)
    return max(trial(entry, case, [False]))


@pytest.mark.parametrize("entry", TILES, ids=lambda entry: entry.name)
def test_its_kernel_is_right_or_wrong_as_it_says(entry: Entry, child: ProcessPoolExecutor) -> None:
    worst = child.submit(_interpreted, entry).result()
    assert (worst > 5e-4) == (entry.statuses != ("ok",)), f"{entry.name}: {worst}"


def test_the_entries_are_listed_without_triton_and_without_cuda() -> None:
    code = (
        "import pkgutil, sys, torch, cheats.gpu; from cheats.corpus import ENTRIES as of; "
        "[__import__(one.name) for one in pkgutil.walk_packages(cheats.gpu.__path__, 'cheats.gpu.')]; "
        "print(sum(one.group != 'honest' for one in of) >= 40, sum(one.group == 'honest' for one in of) >= 15, "
        "'triton' in sys.modules, torch.cuda.is_initialized())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert ran.stdout.split() == ["True", "True", "False", "False"]
