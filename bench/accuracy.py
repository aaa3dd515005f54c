"""python bench/accuracy.py OUT_FOLDER [--seed N] [--cases N] [--processes N] [BACKEND ...]

Checks output and gradients of every backend against the float32 reference over a matrix of cases drawn afresh from a
seed, which is printed. The tolerance of each tensor is measured (attn_exp/attention/tolerance.py). Outputs are
poisoned: memory that a backend gets holds NaN before. Writes accuracy.csv, a row a case, backend and tensor, and
summary.txt.
"""

import argparse
import multiprocessing
import random
import secrets
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rows import write_rows
from tabulate import tabulate

from attn_exp.core.case.case import Case
from attn_exp.core.conf import conf_folder, read_yaml

if TYPE_CHECKING:
    import torch

    from attn_exp.attention.expected import Expected
    from attn_exp.attention.inputs import Inputs
    from attn_exp.backends.base import Calls

FIELDS = ("index", "case", "backend", "status", "tensor", "error", "tolerance", "row_error", "row_tolerance", "reason")
# In turn; sizes and the rest are up to the dice.
_PIECES = 10
WRONG = ("inaccurate", "error", "not_done")
KINDS = ("dense", "causal", "grouped", "longer_kv", "longer_q", "decode", "window", "softcap", "packed", "two_dims")


def draw(seed: int, count: int) -> list[Case]:
    """Cases of all kinds in turn, sizes and the rest at random."""
    dice = random.Random(seed)
    return [_case(dice, KINDS[index % len(KINDS)]) for index in range(count)]


def _case(dice: random.Random, kind: str) -> Case:
    dim = dice.choice([64, 128, 128, 256])
    length = dice.choice([128, 256, 384, 512, 1000, 1024, 1999, 2048])
    kv_heads = dice.choice([1, 2, 4])
    case = Case(
        batch=dice.choice([1, 2, 3]), q_heads=kv_heads, kv_heads=kv_heads, q_len=length, kv_len=length, head_dim=dim,
        value_dim=dim, dtype=dice.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        causal=dice.random() < 0.5, align=dice.choice(["bottom_right", "top_left"]),
        layout=dice.choice(["bhsd", "bshd"]),
    )  # fmt: skip
    if kind in ("dense", "causal"):
        return replace(case, causal=kind == "causal")
    if kind == "grouped":
        return replace(case, q_heads=kv_heads * dice.choice([2, 4, 8]))
    if kind == "longer_kv":
        return replace(case, kv_len=length + dice.choice([1, 64, 500, 1024]), causal=True)
    if kind == "longer_q":
        return replace(case, q_len=length + dice.choice([1, 64, 500]), causal=True, align="top_left")
    if kind == "decode":
        return replace(case, q_len=1, q_heads=kv_heads * dice.choice([1, 4]), causal=True, align="bottom_right")
    if kind == "window":
        return replace(case, causal=True, window=dice.choice([1, 64, 100, 128, 513]))
    if kind == "softcap":
        return replace(case, softcap=dice.choice([5.0, 20.0, 50.0]))
    if kind == "packed":
        lengths = tuple(dice.choice([1, 64, 100, 128, 333, 512]) for _ in range(dice.choice([2, 3, 5])))
        return replace(case, batch=1, q_len=sum(lengths), kv_len=sum(lengths), lengths=lengths)
    return replace(case, head_dim=dice.choice([128, 192]), value_dim=dice.choice([64, 128]))


def check(task: tuple[dict[str, object], list[tuple[int, Case]], int, str]) -> list[dict[str, object]]:
    """The rows of one backend over some cases, in a process of its own."""
    import torch

    from attn_exp.worker.attempt import beyond_this_gpu, error_summary

    config, cases, seed, device = task
    rows = []
    if device == "cuda":
        # A backward runs where its forward ran, and graphs cannot be captured on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream())
    for index, case in cases:
        head = {"index": index, "case": case.label(), "backend": config["name"]}
        try:
            rows += [head | row for row in checked(config, case, seed + index, device)]
        except Exception as error:  # every backend may fail in its own way, and the others are checked all the same
            traceback.print_exc()
            refused = beyond_this_gpu(error)
            rows.append(
                head | {"status": "unsupported" if refused else "error", "reason": refused or error_summary(error)}
            )
    return rows


def not_done(task: tuple[dict[str, object], list[tuple[int, Case]], int, str], why: str) -> list[dict[str, object]]:
    """Rows that say which cases of a piece were not checked, and why."""
    config, cases, _, _ = task
    return [
        {"index": index, "case": case.label(), "backend": config["name"], "status": "not_done", "reason": why}
        for index, case in cases
    ]


def checked(config: dict[str, object], case: Case, seed: int, device: str) -> list[dict[str, object]]:
    """A row for each tensor of one backend on one case."""
    from attn_exp.attention.expected import expected
    from attn_exp.attention.inputs import make_inputs
    from attn_exp.backends.base import load_backend, supported_passes
    from attn_exp.backends.compile import reset_dynamo
    from attn_exp.backends.package import Refused, Unavailable

    reset_dynamo()
    try:
        backend = load_backend(config)
        reason = backend.unsupported(case, device)
        if reason:
            return [{"status": "unsupported", "reason": reason}]
        with_gradients = "backward" in supported_passes(backend, case)
        inputs = make_inputs(case, device, seed, with_gradients=with_gradients)
        wanted = expected(case, inputs, with_gradients=with_gradients)
        calls = backend.prepare(case, inputs)
        tensors = computed(calls, device, inputs.q_bhsd.numel(), with_gradients=with_gradients)
    except Refused as error:
        return [{"status": "unsupported", "reason": str(error)}]
    except Unavailable as error:
        return [{"status": "unavailable", "reason": str(error)}]
    return compared(case, inputs, wanted, tensors, calls)


def computed(calls: "Calls", device: str, numbers: int, *, with_gradients: bool) -> "dict[str, torch.Tensor]":
    """Output and gradients of a backend's calls; memory for so many numbers is poisoned before each."""
    import torch

    with calls.scope():
        _poison(device, numbers)
        out = calls.forward()
        tensors = {"out": out.detach()}
        if with_gradients:
            backward = calls.backward(out)
            _poison(device, numbers)
            tensors |= dict(zip(("dq", "dk", "dv"), backward(), strict=True))
        if device == "cuda":
            torch.cuda.synchronize()
    return tensors


def compared(
    case: Case, inputs: "Inputs", wanted: "Expected", tensors: "dict[str, torch.Tensor]", calls: "Calls"
) -> list[dict[str, object]]:
    """A row for each tensor, compared with the reference."""
    from attn_exp.attention.error import inaccuracy
    from attn_exp.attention.verdict import verdict

    found = verdict(case, inputs, wanted, tensors, calls.scales)
    return [
        {
            "status": "inaccurate"
            if (wrong := inaccuracy({name: error}) or (found.wrong if name == "out" else None))
            else "ok",
            "tensor": name,
            "error": error.relative,
            "tolerance": error.tolerance,
            "row_error": error.worst_row,
            "row_tolerance": error.row_tolerance,
            "reason": wrong or "",
        }
        for name, error in found.errors.items()
    ]


def _poison(device: str, numbers: int) -> None:
    """Fill what the allocator will hand out next with NaN."""
    import torch

    held = [
        torch.full((numbers,), float("nan"), dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)
    ]
    del held


def summary(rows: list[dict[str, object]], cases: int) -> str:
    """A line a backend: cases right, refused, wrong, and the worst error of its tolerance."""
    lines = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == name]
        by_status: dict[str, set[object]] = {}
        for row in mine:
            by_status.setdefault(str(row["status"]), set()).add(row["index"])
        wrong = set().union(*(by_status.get(status, set()) for status in WRONG))
        judged = [row for row in mine if row.get("tolerance") and row.get("error") is not None]
        worst = max((row["error"] / row["tolerance"] for row in judged), default=None)  # type: ignore[operator]
        worst_row = max((row["row_error"] / row["row_tolerance"] for row in judged), default=None)  # type: ignore[operator]
        refused = len(by_status.get("unsupported", ())) + len(by_status.get("unavailable", ()))
        right = len(by_status.get("ok", set()) - wrong)
        lines.append(
            [name, right, len(wrong), refused, *(f"{x:.2f}" if x is not None else "" for x in (worst, worst_row))]
        )
    headers = ["backend", "right", "wrong", "refused", "worst error of tolerance", "worst row of tolerance"]
    return f"{cases} cases\n\n" + tabulate(lines, headers)


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument(
        "--budget-s", type=float, default=3600.0, help="what is not done by then is `not_done`, and a failure"
    )
    parser.add_argument("backends", nargs="*")
    given = parser.parse_intermixed_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = sorted((conf_folder() / "backend").glob("*.yaml"))
    configs = [read_yaml(path) for path in paths if not given.backends or path.stem in given.backends]
    cases = list(enumerate(draw(given.seed, given.cases)))
    print(f"seed {given.seed}, {len(cases)} cases, {len(configs)} backends on {device}", flush=True)
    # In pieces, since some backends compile for each case; in more of them where few backends share the processes.
    pieces = max(_PIECES, given.processes // max(1, len(configs)))
    tasks = [(config, cases[first::pieces], given.seed, device) for first in range(pieces) for config in configs]
    began, rows = time.time(), []
    pool = ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn"))
    asked = {pool.submit(check, task): task for task in tasks}
    done, late = wait(asked, timeout=given.budget_s)
    for one, task in asked.items():
        ended = one in done and one.exception() is None
        rows += one.result() if ended else not_done(task, "the time was over" if one in late else repr(one.exception()))
    # Whoever still computes would be waited for.
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)
    rows.sort(key=lambda row: (str(row["backend"]), int(row["index"])))  # type: ignore[call-overload]
    given.out.mkdir(parents=True, exist_ok=True)
    write_rows(given.out / "accuracy.csv", rows, FIELDS, digits=4)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    text = f"{name}, torch {torch.__version__}, seed {given.seed}: {summary(rows, len(cases))}\n"
    (given.out / "summary.txt").write_text(text)
    print(text)
    for row in rows:
        if row["status"] in WRONG:
            print(row["backend"], row["case"], row.get("tensor"), row["reason"])
    print(f"{time.time() - began:.0f} s")
    return int(any(row["status"] in WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())
