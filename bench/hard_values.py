"""python bench/hard_values.py OUT_FOLDER [--seed N] [--seeds N] [--kinds KIND,...] [--processes N] [BACKEND ...]

Runs every backend that this machine has on every kind of inputs (conf/inputs), over small cases of all masks and
dtypes, and compares output and gradients with the float32 reference. Writes hard_values.csv, a row a backend, kind,
case and tensor that ran, and hard_values.md, and prints a short table last: wrong cases of those that ran.
"""

import argparse
import csv
import multiprocessing
import platform
import re
import secrets
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, wait
from importlib import metadata
from pathlib import Path

from accuracy import FIELDS, WRONG, checked
from tabulate import tabulate

from attn_exp.core.case import NORMAL, Case
from attn_exp.core.catalogue import input_kinds, packages
from attn_exp.core.conf import conf_folder, read_yaml

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
# On a GPU the lengths at which public bugs were seen: 64 beyond a multiple of 128 (pytorch#196678).
LENGTHS = {"cpu": (192,), "cuda": (704, 1024)}
MASKS: tuple[dict[str, object], ...] = (
    {"causal": False},
    {"causal": True},
    {"causal": True, "kv_heads": 1},
    {"causal": True, "window": 50},
    {"causal": True, "softcap": 50.0},
    {"causal": False, "softcap": 30.0},
    {"causal": True, "layout": "bshd"},
    {"causal": True, "q_len": 1},
    {"causal": True, "packed": True},
)
REFUSED = ("unsupported", "unavailable")
Task = tuple[dict[str, object], str, tuple[tuple[int, Case], ...], int, int, str]


def cases(device: str) -> list[Case]:
    """All masks in all dtypes and lengths."""
    return [_case(dtype, length, **mask) for dtype in DTYPES for length in LENGTHS[device] for mask in MASKS]


def _case(dtype: str, length: int, *, packed: bool = False, **more: object) -> Case:
    dim = 64 if length < 1024 else 128
    sizes: dict[str, object] = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": length, "kv_len": length}
    sizes |= {"head_dim": dim, "value_dim": dim, "dtype": dtype}
    if packed:
        sizes["lengths"] = (length // 3, length - length // 3)
    return Case(**(sizes | more))  # type: ignore[arg-type]


def check(task: Task) -> list[dict[str, object]]:
    """The rows of one backend on inputs of one kind, in a process of its own."""
    import torch

    from attn_exp.worker.attempt import beyond_this_gpu, error_summary

    config, kind, numbered, seed, seeds, device = task
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    rows: list[dict[str, object]] = []
    for index, case in numbered:
        head = {"index": index, "case": case.label(), "backend": config["name"], "kind": kind}
        for again in range(seeds):
            try:
                made = checked(config, case, seed + again, device, kind)
            except Exception as error:  # every backend may fail in its own way, and the others are checked all the same
                traceback.print_exc()
                refused = beyond_this_gpu(error)
                made = [{"status": "unsupported" if refused else "error", "reason": refused or error_summary(error)}]
            rows += [head | row for row in made]
            if made[0]["status"] in REFUSED:
                break
    return rows


def table(rows: list[dict[str, object]], kinds: list[str], form: str) -> str:
    """Wrong cases of those that ran, by backend and kind; backends that ran nothing are left out."""
    lines = []
    for name in dict.fromkeys(str(row["backend"]) for row in rows):
        line = [name]
        for kind in kinds:
            mine = [row for row in rows if row["backend"] == name and row["kind"] == kind]
            ran = {row["index"] for row in mine if row["status"] not in REFUSED}
            wrong = {row["index"] for row in mine if row["status"] in WRONG}
            line.append(f"{len(wrong)}/{len(ran)}" if ran else "")
        if any(line[1:]):
            lines.append(line)
    return tabulate(lines, ["backend", *kinds], tablefmt=form)


def sources(kind: str) -> str:
    """The public reports that the file of a kind names."""
    text = (conf_folder() / "inputs" / f"{kind}.yaml").read_text()
    return ", ".join(dict.fromkeys(re.findall(r"[\w-]+#\d+|arXiv:[\d.]+", text)))


def markdown(rows: list[dict[str, object]], kinds: list[str], title: str) -> str:
    """The table, and a line for each backend, kind and tensor that is wrong."""
    parts = ["# Hard values", title, "Wrong cases of those that ran:", table(rows, kinds, "github")]
    wrong: dict[tuple[str, str], list[dict[str, object]]] = {}
    for row in rows:
        if row["status"] in WRONG:
            wrong.setdefault((str(row["backend"]), str(row["kind"])), []).append(row)
    lines = [
        [name, kind, len({row["index"] for row in several}), several[0]["case"], several[0]["reason"], sources(kind)]
        for (name, kind), several in wrong.items()
    ]
    headers = ["backend", "inputs", "cases", "for example", "reason", "reports of such values"]
    parts += ["What is wrong:", tabulate(lines, headers, tablefmt="github")] if lines else ["Nothing is wrong."]
    absent = {str(row["backend"]): str(row["reason"]) for row in rows if row["status"] == "unavailable"}
    parts += [f"- {name} did not run: {reason}" for name, reason in sorted(absent.items())]
    return "\n\n".join(parts) + "\n"


def versions() -> str:
    """The installed versions of torch and of the backends' packages."""
    found = []
    for name in dict.fromkeys(("torch", "triton", *packages())):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(input_kinds()))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("backends", nargs="*")
    given = parser.parse_intermixed_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = sorted(given.kinds.split(","), key=lambda kind: kind != NORMAL)
    paths = sorted((conf_folder() / "backend").glob("*.yaml"))
    configs = [read_yaml(path) for path in paths if not given.backends or path.stem in given.backends]
    numbered = tuple(enumerate(cases(device)))
    tasks: list[Task] = [
        (config, kind, numbered, given.seed, given.seeds, device) for config in configs for kind in kinds
    ]
    began, rows = time.time(), []
    pool = ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn"))
    asked = {pool.submit(check, task): task for task in tasks}
    done, late = wait(asked, timeout=given.budget_s)
    for one, (config, kind, *_) in asked.items():
        if one in done and one.exception() is None:
            rows += one.result()
        else:
            why = "the time was over" if one in late else repr(one.exception())
            rows.append({"index": -1, "case": "", "backend": config["name"], "kind": kind, "status": "not_done"})
            rows[-1]["reason"] = why
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "hard_values.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["kind", *FIELDS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            for row in rows
            if row["status"] not in REFUSED
        )
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    title = f"{name}, {versions()}, seed {given.seed}, {given.seeds} seeds of each of {len(numbered)} cases."
    (given.out / "hard_values.md").write_text(markdown(rows, kinds, title))
    for row in rows:
        if row["status"] in WRONG:
            print(row["backend"], row["kind"], row["case"], row.get("tensor"), row["reason"])
    print(f"{title} {time.time() - began:.0f} s\n{table(rows, kinds, 'simple')}")
    return int(any(row["status"] in WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())
