"""python bench/hard_values.py OUT_FOLDER [--seed N] [--seeds N] [--kinds KIND,...] [--processes N] [--budget-s S]
                           [BACKEND ...]

Runs every backend that this machine has on every kind of inputs (conf/inputs), over small cases of all masks and
dtypes, and compares output and gradients with the float32 reference. Writes hard_values.csv, a row a backend, kind,
case and tensor that ran, and hard_values.md, and prints a short table last: wrong cases of those that ran.

bf16 without a window or softcap comes first, then fp16, then the other masks, then the other dtypes. Each backend and
kind is in hard_values.jsonl as soon as it is done, and the tables follow every few seconds. After the budget, or a
kill, the same command goes on from there; what is left out is said last, and in hard_values.md.
"""

import argparse
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from accuracy import WRONG
from apart import Apart, Ended
from hard_journal import Journal, Key
from hard_tables import table, versions, write_tables
from hard_worker import Row, Said, Task, check

from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.catalogue import input_kinds
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.host.nvml import list_gpus

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
_SILENCE_S = 120.0
_TABLES_EVERY_S = 5.0


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
    todo = []
    for config, kinds in task.todo:
        left = tuple(kind for kind in kinds if (task.index, task.seed, str(config["name"]), kind) not in done)
        todo += [(config, left)] if left else []
    return Task(task.index, task.case, task.seed, tuple(todo), task.device) if todo else None


def run(tasks: list[Task], journal: Journal, processes: int, until: float, show: Callable[[], object]) -> None:
    """Check until all is done or the time is over."""
    todo = deque(left for task in tasks if (left := left_of(task, journal.done)))
    shown = time.monotonic()
    # With the tasks, so that no other gets the identity of one that is over.
    begun: dict[int, tuple[Task, Key]] = {}
    for task, said in Apart(check, processes, _SILENCE_S).run(todo, until):
        if isinstance(said, Said):
            key = task.index, task.seed, said.backend, said.kind
            begun[id(task)] = task, key
            if said.rows is not None:
                journal.add(key, said.rows)
        elif isinstance(said, Ended):
            # What it was at is why; nothing is if that was done.
            config, kinds = task.todo[0]
            _, key = begun.get(id(task), (task, (task.index, task.seed, str(config["name"]), kinds[0])))
            if key not in journal.done:
                journal.add(key, [{"status": "error", "reason": f"the process {said.how}"}])
            todo.extendleft(left for left in [left_of(task, journal.done)] if left)
        if time.monotonic() - shown > _TABLES_EVERY_S:
            show()
            shown = time.monotonic()


def rows_of(tasks: list[Task], done: dict[Key, list[Row]]) -> list[Row]:
    """The rows of what is done, by backend, kind and case."""
    places: dict[Key, Case] = {}
    for task in tasks:
        for config, kinds in task.todo:
            places |= {(task.index, task.seed, str(config["name"]), kind): task.case for kind in kinds}
    names = list(dict.fromkeys(key[2] for key in places))
    kinds = list(dict.fromkeys(key[3] for key in places))
    return [
        {"index": key[0], "case": places[key].label(), "backend": key[2], "kind": key[3]} | row
        for key in sorted(places, key=lambda key: (names.index(key[2]), kinds.index(key[3]), *key[:2]))
        for row in done.get(key, ())
    ]


def left_out(tasks: list[Task], done: dict[Key, list[Row]]) -> str:
    """How many of each backend's cases and kinds are not done; empty if all are."""
    left: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for task in tasks:
        every.update({str(config["name"]): len(kinds) for config, kinds in task.todo})
        rest = left_of(task, done)
        left.update({str(config["name"]): len(kinds) for config, kinds in rest.todo} if rest else {})
    return ", ".join(f"{name} {count} of {every[name]} pairs of case and inputs" for name, count in left.items())


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int)
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
    journal = Journal(given.out / "hard_values.jsonl", {"where": where, "versions": versions(), "seed": given.seed})
    chosen = cases(device)
    tasks = tasks_of(configs, kinds, range(journal.seed, journal.seed + given.seeds), chosen, device)
    title = f"{where}, {versions()}, seed {journal.seed}, {given.seeds} seeds of each of {len(chosen)} cases."

    def show() -> list[Row]:
        rows = rows_of(tasks, journal.done)
        write_tables(given.out, rows, kinds, title, left_out(tasks, journal.done))
        return rows

    run(tasks, journal, given.processes, began + given.budget_s, show)
    rows, left = show(), left_out(tasks, journal.done)
    for row in rows:
        if row["status"] in WRONG:
            print(row["backend"], row["kind"], row["case"], row.get("tensor"), row["reason"])
    print(f"{title} {time.monotonic() - began:.0f} s\n{table(rows, kinds, 'simple')}")
    if left:
        print(f"Left out, since the time was over: {left}. The same command goes on.")
    else:
        journal.path.unlink()
    return 1 if any(row["status"] in WRONG for row in rows) else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
