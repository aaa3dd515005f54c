"""python bench/hard_values.py OUT_FOLDER [--seed N] [--seeds N] [--kinds KIND,...] [--processes N] [--budget-s S]
                           [BACKEND ...]

Runs every backend that this machine has on every kind of inputs (conf/inputs), over small cases of all masks and
dtypes, and compares output and gradients with the float32 reference. Writes hard_values.csv, a row a backend, kind,
case and tensor that ran, and hard_values.md, and prints a short table last: wrong cases of those that ran.

bf16 without a window or softcap comes first, then fp16, then the other masks, then the other dtypes. The tables are
written every few seconds. What the budget leaves out is said last, and in hard_values.md.
"""

import argparse
import multiprocessing
import os
import platform
import re
import secrets
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accuracy import FIELDS, WRONG, compared, computed
from rows import write_rows
from tabulate import tabulate

from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.catalogue import input_kinds, packages
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.errors import how_it_ended
from attn_exp.core.host.nvml import list_gpus
from attn_exp.core.host.process import die_with_parent, prefer_to_be_killed

if TYPE_CHECKING:
    from attn_exp.attention.expected import Expected
    from attn_exp.attention.inputs import Inputs

Row = dict[str, object]
# Of a backend and a kind on a case: the case's index, seed, backend, kind.
Key = tuple[int, int, str, str]

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
# On a GPU the lengths at which public bugs were seen: 64 beyond a multiple of 128 (pytorch#196678).
LENGTHS = {"cpu": (192,), "cuda": (704, 1024)}
MASKS: tuple[dict[str, object], ...] = (
    {"causal": True},
    {"causal": False},
    {"causal": True, "q_len": 1},
    # cudnn-frontend#1072, and flash-attention#2082, where the first tile of some rows is hidden.
    {"causal": False, "q_len": 1, "kv_len": 128},
    {"causal": True, "q_len": 88, "kv_len": 448, "q_heads": 14},
    {"causal": True, "kv_heads": 1},
    {"causal": False, "softcap": 30.0},
    {"causal": True, "softcap": 50.0},
    {"causal": True, "window": 50},
    {"causal": True, "layout": "bshd"},
    {"causal": True, "packed": True},
)
# Those that most programs run come first.
FIRST = ("cudnn", "flash", "efficient", "math", "flex", "triton", "cudnn_graph", "auto")
# Seconds for each new case: these get a process of their own.
COMPILED = ("flex", "triton", "compiled", "fa4", "helion")
REFUSED = ("unsupported", "unavailable")
_SILENCE_S = 120.0
_TABLES_EVERY_S = 5.0


@dataclass(frozen=True)
class Task:
    """Backends and kinds of inputs to be checked on a case.

    Attributes:
        index: the case's place among all.
        case: the case.
        seed: of its inputs.
        todo: pairs of a backend's configuration and the kinds that are not done.
        device: `cpu` or `cuda`.
    """

    index: int
    case: Case
    seed: int
    todo: tuple[tuple[dict[str, object], tuple[str, ...]], ...]
    device: str

    def places(self) -> list[Key]:
        """All backends and kinds of the task, in turn."""
        return [(self.index, self.seed, str(config["name"]), kind) for config, kinds in self.todo for kind in kinds]


def cases(device: str) -> list[Case]:
    """All masks in all dtypes and lengths, in the order in which they are checked."""
    plain, others = MASKS[:2], MASKS[2:]
    stages = [(dtype, masks) for masks in (plain, others) for dtype in DTYPES[:2]]
    stages += [(dtype, MASKS) for dtype in DTYPES[2:]]
    return [_case(dtype, length, **mask) for dtype, masks in stages for length in LENGTHS[device] for mask in masks]


def _case(dtype: str, length: int, *, packed: bool = False, **more: object) -> Case:
    dim = 64 if length < 1024 else 128
    sizes: dict[str, object] = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": length, "kv_len": length}
    sizes |= {"head_dim": dim, "value_dim": dim, "dtype": dtype}
    if packed:
        sizes["lengths"] = (length // 3, length - length // 3)
    return Case(**(sizes | more))  # type: ignore[arg-type]


def tasks_of(
    configs: list[dict[str, object]], kinds: list[str], seeds: Sequence[int], chosen: list[Case], device: str
) -> list[Task]:
    """A task for each case and all backends that compile nothing, and one for each other backend.

    bf16 without a special mask, then fp16, then all else, and among these first the backends that compile nothing.
    """
    pairs = [(config, tuple(kinds)) for config in configs]
    together = tuple(pair for pair in pairs if pair[0]["name"] not in COMPILED)
    alone = [(pair,) for pair in pairs if pair[0]["name"] in COMPILED]
    plain = 2 * len(LENGTHS[device])
    turns = [
        ((min(index // plain, 2), todo is not together, index), Task(index, case, seed, todo, device))
        for seed in seeds
        for index, case in enumerate(chosen)
        for todo in (together, *alone)
        if todo
    ]
    return [task for _, task in sorted(turns, key=lambda turn: turn[0])]


def left_of(task: Task, done: dict[Key, list[Row]]) -> Task | None:
    """A task without what is done; None if nothing is left."""
    left = {key[2:] for key in task.places() if key not in done}
    todo = [(config, tuple(kind for kind in kinds if (config["name"], kind) in left)) for config, kinds in task.todo]
    return replace(task, todo=tuple(one for one in todo if one[1])) if left else None


def check(task: Task) -> Iterator[tuple[Key, list[Row] | None]]:
    """Yield each backend and kind as it begins, with None, and with its rows as it ends.

    A backend is prepared once for a case, and the kinds are written into the tensors that it reads, as a job does
    between its calls: it compiles once. The references are shared by the backends.

    Raises:
        RuntimeError: the GPU is in an error that this process cannot leave.
    """
    import torch

    from attn_exp.backends.compile import reset_dynamo

    torch.set_num_threads(1)
    if task.device == "cuda":
        # A backward runs where its forward ran, and graphs cannot be captured on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream())
    reset_dynamo()
    references = _References(task)
    for config, kinds in task.todo:
        name = str(config["name"])
        rows: list[Row] = []
        made = None
        for kind in kinds:
            key = task.index, task.seed, name, kind
            yield key, None
            if not rows or rows[0]["status"] not in REFUSED:
                try:
                    made = made or _Made(task, config, references)
                    rows = made.rows(kind)
                except Exception as error:  # every backend may fail in its own way
                    rows, made = [_failed(error)], None
            yield key, rows
            if task.device == "cuda":
                torch.cuda.synchronize()


def _failed(error: Exception) -> Row:
    from attn_exp.backends.package import Refused, Unavailable
    from attn_exp.worker.attempt import beyond_this_gpu, error_summary

    if isinstance(error, Unavailable):
        return {"status": "unavailable", "reason": str(error)}
    refused = str(error) if isinstance(error, Refused) else beyond_this_gpu(error)
    if refused:
        return {"status": "unsupported", "reason": refused}
    traceback.print_exc()
    return {"status": "error", "reason": error_summary(error)}


class _References:
    """Inputs of a case, and their references, which are made once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._kept: dict[tuple[str, bool], Expected] = {}

    def inputs(self, kind: str, *, with_gradients: bool) -> "Inputs":
        from attn_exp.attention.hard_values import make_inputs_of

        task = self._task
        return make_inputs_of(kind, task.case, task.device, task.seed, with_gradients=with_gradients)

    def of(self, kind: str, *, with_gradients: bool) -> "Expected":
        from attn_exp.attention.expected import expected

        key = kind, with_gradients
        if key not in self._kept:
            inputs = self.inputs(kind, with_gradients=with_gradients)
            self._kept[key] = expected(self._task.case, inputs, with_gradients=with_gradients)
        return self._kept[key]


class _Made:
    """A backend that is prepared for a case, on normal inputs."""

    def __init__(self, task: Task, config: dict[str, Any], references: _References) -> None:
        from attn_exp.backends.base import load_backend, supported_passes
        from attn_exp.backends.package import Refused

        self._task, self._references = task, references
        backend = load_backend(config)
        reason = backend.unsupported(task.case, task.device)
        if reason:
            raise Refused(reason)
        self._with_gradients = "backward" in supported_passes(backend, task.case)
        self._inputs = references.inputs(NORMAL, with_gradients=self._with_gradients)
        self._calls = backend.prepare(task.case, self._inputs)

    def rows(self, kind: str) -> list[Row]:
        """Return a row for each tensor, on inputs of a kind."""
        task, calls = self._task, self._calls
        values = self._references.inputs(kind, with_gradients=self._with_gradients)
        wanted = self._references.of(kind, with_gradients=self._with_gradients)
        read = calls.inputs or self._inputs
        for tensor, value in zip((*read.operands, read.d_out), (*values.operands, values.d_out), strict=True):
            tensor.data.copy_(value.detach())
        tensors = computed(calls, task.device, values.q_bhsd.numel(), with_gradients=self._with_gradients)
        return compared(task.case, values, wanted, tensors, calls)


def serve(pipe: Connection, parent: int) -> None:
    """Check tasks in a forked process, and send what is said of each, at last None."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    prefer_to_be_killed()
    # Inductor would start as many processes as there are cores for each of these.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        while True:
            for said in check(pipe.recv()):
                pipe.send(said)
            pipe.send(None)
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the interpreter's teardown is the parent's


@dataclass
class Running:
    """A process and what it is at: a crash or a hang costs one backend on one kind."""

    process: Any
    pipe: Connection
    task: Task
    key: Key
    heard: float

    @staticmethod
    def start(task: Task) -> "Running":
        """Fork the process; this one must not have used a GPU."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, os.getpid()))
        process.start()
        there.close()
        one = Running(process, here, task, task.places()[0], 0.0)
        one.begin(task)
        return one

    def begin(self, task: Task) -> None:
        """Hand a task out."""
        self.task, self.key, self.heard = task, task.places()[0], time.monotonic()
        # A process that has just died is noticed when it is listened to.
        with suppress(BrokenPipeError):
            self.pipe.send(task)

    def end(self, patience_s: float = 0.0) -> str:
        """End the process and those that it started; return how it ended."""
        self.process.join(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return how_it_ended(self.process.exitcode or 0)


def run(
    tasks: list[Task], done: dict[Key, list[Row]], processes: int, until: float, show: Callable[[], object]
) -> None:
    """Check until all is done or the time is over."""
    todo, shown, running = deque(tasks), time.monotonic(), list[Running]()
    try:
        while (todo or running) and time.monotonic() < until:
            while todo and len(running) < processes:
                running.append(Running.start(todo.popleft()))
            ready = wait([one.pipe for one in running], max(0.0, min(until - time.monotonic(), 1.0)))
            for one in list(running):
                how = None
                if one.pipe in ready:
                    try:
                        said = one.pipe.recv()
                        one.heard = time.monotonic()
                        if said is not None:
                            one.key, rows = said
                            done |= {one.key: rows} if rows is not None else {}
                        elif todo:
                            one.begin(todo.popleft())
                        else:
                            running.remove(one)
                            one.end()
                    except (EOFError, ConnectionResetError):
                        how = one.end(2.0)
                elif time.monotonic() > one.heard + _SILENCE_S:
                    one.end()
                    how = f"had not returned after {_SILENCE_S:g} s"
                if how is not None:
                    running.remove(one)
                    if (rest := left_of(one.task, done)) is not None:
                        # What it was at is why; nothing is if that was done.
                        done.setdefault(one.key, [{"status": "error", "reason": f"the process {how}"}])
                        todo.extendleft(again for again in [left_of(rest, done)] if again)
            if time.monotonic() - shown > _TABLES_EVERY_S:
                show()
                shown = time.monotonic()
    finally:
        for one in running:
            one.end()


def rows_of(tasks: list[Task], done: dict[Key, list[Row]]) -> list[Row]:
    """The rows of what is done, by backend, kind and case."""
    places = {key: task.case for task in tasks for key in task.places()}
    names, kinds = (list(dict.fromkeys(key[at] for key in places)) for at in (2, 3))
    return [
        {"index": key[0], "case": places[key].label(), "backend": key[2], "kind": key[3]} | row
        for key in sorted(places, key=lambda key: (names.index(key[2]), kinds.index(key[3]), *key[:2]))
        for row in done.get(key, ())
    ]


def left_out(tasks: list[Task], done: dict[Key, list[Row]]) -> str:
    """How many of each backend's cases and kinds are not done; empty if all are."""
    keys = [key for task in tasks for key in task.places()]
    every, left = Counter(key[2] for key in keys), Counter(key[2] for key in keys if key not in done)
    return ", ".join(f"{name} {count} of {every[name]} pairs of case and inputs" for name, count in left.items())


def write_tables(out: Path, rows: list[Row], kinds: list[str], title: str, left_out: str) -> None:
    """Write hard_values.csv and hard_values.md; a reader sees the old ones or the new ones."""
    unfinished = out / "hard_values.csv.new"
    ran = [row for row in rows if row["status"] not in REFUSED]
    write_rows(unfinished, ran, ["kind", *FIELDS], digits=4)
    unfinished.replace(out / "hard_values.csv")
    unfinished = out / "hard_values.md.new"
    unfinished.write_text(markdown(rows, kinds, title, left_out))
    unfinished.replace(out / "hard_values.md")


def table(rows: list[Row], kinds: list[str], form: str) -> str:
    """Wrong cases of those that ran, by backend and kind; backends that ran nothing are left out."""
    ran, wrong = defaultdict(set), defaultdict(set)
    for row in rows:
        cell = row["backend"], row["kind"]
        if row["status"] not in REFUSED:
            ran[cell].add(row["index"])
        if row["status"] in WRONG:
            wrong[cell].add(row["index"])
    lines = []
    for name in dict.fromkeys(name for name, _ in ran):
        cells = [(name, kind) for kind in kinds]
        lines.append([name, *(f"{len(wrong[cell])}/{len(ran[cell])}" if cell in ran else "" for cell in cells)])
    return tabulate(lines, ["backend", *kinds], tablefmt=form)


def markdown(rows: list[Row], kinds: list[str], title: str, left_out: str) -> str:
    """The table, and a line for each backend, kind and reason that is wrong."""
    parts = ["# Hard values", title, "Wrong cases of those that ran:", table(rows, kinds, "github")]
    wrong = defaultdict(list)
    for row in rows:
        if row["status"] in WRONG:
            wrong[row["backend"], str(row["kind"])].append(row)
    lines = [
        [name, kind, len({row["index"] for row in several}), several[0]["case"], several[0]["reason"], sources(kind)]
        for (name, kind), several in wrong.items()
    ]
    headers = ["backend", "inputs", "cases", "for example", "reason", "reports of such values"]
    parts += ["What is wrong:", tabulate(lines, headers, tablefmt="github")] if lines else ["Nothing is wrong."]
    absent = {str(row["backend"]): str(row["reason"]) for row in rows if row["status"] == "unavailable"}
    parts += ["\n".join(f"- {name} did not run: {reason}" for name, reason in sorted(absent.items()))]
    parts += [f"Left out, since the time was over: {left_out}."] if left_out else []
    return "\n\n".join(part for part in parts if part) + "\n"


def sources(kind: str) -> str:
    """The public reports that the file of a kind names."""
    text = (conf_folder() / "inputs" / f"{kind}.yaml").read_text()
    return ", ".join(dict.fromkeys(re.findall(r"[\w-]+#\d+|arXiv:\d+\.\d+", text)))


def versions() -> str:
    """The installed versions of torch and of the backends' packages."""
    found = []
    for name in dict.fromkeys(("torch", "triton", *packages())):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(input_kinds()))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="what is not done by then is left out")
    parser.add_argument("backends", nargs="*")
    given = parser.parse_intermixed_args(words)
    import torch  # for the processes, which are forked, and must find CUDA not initialised

    gpus = list_gpus() if torch.version.cuda else []
    device = "cuda" if gpus else "cpu"
    where = gpus[0].name if gpus else f"CPU ({platform.machine()})"
    kinds = sorted(given.kinds.split(","), key=lambda kind: kind != NORMAL)
    read = [read_yaml(path) for path in sorted((conf_folder() / "backend").glob("*.yaml"))]
    configs = [config for config in read if not given.backends or config["name"] in given.backends]
    configs.sort(key=lambda config: FIRST.index(config["name"]) if config["name"] in FIRST else len(FIRST))
    given.out.mkdir(parents=True, exist_ok=True)
    done: dict[Key, list[Row]] = {}
    chosen = cases(device)
    tasks = tasks_of(configs, kinds, range(given.seed, given.seed + given.seeds), chosen, device)
    title = f"{where}, {versions()}, seed {given.seed}, {given.seeds} seeds of each of {len(chosen)} cases."

    def show() -> list[Row]:
        rows = rows_of(tasks, done)
        write_tables(given.out, rows, kinds, title, left_out(tasks, done))
        return rows

    run(tasks, done, given.processes, began + given.budget_s, show)
    rows, left = show(), left_out(tasks, done)
    for row in rows:
        if row["status"] in WRONG:
            print(row["backend"], row["kind"], row["case"], row.get("tensor"), row["reason"])
    print(f"{title} {time.monotonic() - began:.0f} s\n{table(rows, kinds, 'simple')}")
    if left:
        print(f"Left out, since the time was over: {left}.")
    return 1 if any(row["status"] in WRONG for row in rows) else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
