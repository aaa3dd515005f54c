"""Checks the Triton kernels on an H200 and times their configurations, a wide space of them.

    python bench/triton_tune.py --budget-s 360      (in the repository's root; writes triton_tune.csv)

Three steps, each in child processes, because a compiler or a kernel may take its process down: a few cases against
float64 formulas, with outputs poisoned beforehand; compilation of every configuration, without touching the GPU; timing
of those that compiled, with CUDA events. Backward TFLOPS count 2.5 times the forward's operations.
"""

import argparse
import csv
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())

# batch, q_heads, length, head_dim, causal
SHAPES = [
    (4, 16, 4096, 128, False),
    (4, 16, 4096, 128, True),
    (4, 32, 4096, 64, False),
    (4, 32, 4096, 64, True),
    (2, 8, 4096, 256, False),
    (2, 8, 4096, 256, True),
]
PASSES = ("forward", "dkdv", "dk", "dv", "dq")
SHARED_BYTES = 227 * 1024

# dtype, batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, options of attention(), how
CHECKS: list[tuple[str, int, int, int, int, int, int, int, dict[str, Any], str]] = [
    ("bfloat16", 2, 4, 4, 1024, 1024, 128, 128, {}, ""),
    ("bfloat16", 2, 4, 4, 1024, 1024, 128, 128, {}, "overlap"),
    ("bfloat16", 2, 4, 4, 1024, 1024, 128, 128, {"causal": True}, ""),
    ("bfloat16", 2, 4, 4, 2048, 2048, 128, 128, {"causal": True}, "overlap"),
    ("bfloat16", 2, 4, 2, 1000, 1333, 64, 64, {"causal": True}, "overlap"),
    ("bfloat16", 2, 4, 2, 1000, 1333, 64, 64, {"causal": True, "offset": 0}, "pointers"),
    ("float16", 2, 8, 1, 777, 1500, 64, 64, {"causal": True, "window": 300}, ""),
    ("bfloat16", 1, 4, 2, 900, 500, 128, 128, {"causal": True}, "bshd"),
    ("bfloat16", 1, 4, 4, 700, 700, 192, 128, {"causal": True}, ""),
    ("float16", 1, 4, 4, 513, 640, 256, 256, {}, ""),
    ("bfloat16", 1, 4, 4, 1024, 1024, 128, 128, {"causal": True, "softcap": 20.0}, ""),
    ("bfloat16", 4, 8, 2, 1, 3000, 128, 128, {"causal": True}, ""),
    ("float32", 1, 2, 1, 500, 700, 64, 64, {"causal": True}, ""),
    ("float32", 1, 2, 2, 500, 500, 128, 128, {}, "bshd"),
    ("bfloat16", 2, 4, 4, 512, 512, 64, 64, {"causal": True}, "autotuned"),
    ("bfloat16", 1, 4, 4, 700, 700, 192, 128, {"causal": True}, "autotuned"),
    ("float16", 1, 4, 4, 513, 640, 256, 256, {}, "autotuned"),
    ("float32", 1, 2, 2, 500, 500, 128, 128, {}, "autotuned"),
]


def main() -> None:
    started = time.monotonic()
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--budget-s", type=float, default=360.0)
    options.add_argument("--out", type=Path, default=Path(), help="the folder that triton_tune.csv is written to")
    options.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options.add_argument("--worker", choices=("check", "compile", "measure"))
    options.add_argument("--deadline", type=float, default=0.0)
    options.add_argument("--limit", type=int, help="only so many configurations of each pass, to try this script out")
    given = options.parse_args()
    if given.worker:
        _work(given.worker, given.deadline)
        return
    end = time.time() + given.budget_s
    _check(given, min(end, time.time() + 0.3 * given.budget_s))
    print(f"checked after {time.monotonic() - started:.0f} s")
    space = [task for shape in SHAPES for task in configurations(shape, given.limit)]
    compiled = _in_children("compile", space, given.processes, min(end, time.time() + 0.4 * given.budget_s))
    good = [answer for answer in compiled if "error" not in answer]
    print(f"{len(good)} of {len(space)} configurations compiled after {time.monotonic() - started:.0f} s")
    # Those without spilled registers and serialized products first, in case time runs out.
    good.sort(key=lambda task: (task["serialized"], task["spills"] > 0, not task["tma"], task["shape"]))
    timed = _in_children("measure", good, 1, min(end - 10, time.time() + 100))
    print(f"{sum('ms' in answer for answer in timed)} timed after {time.monotonic() - started:.0f} s")
    failed = [answer for answer in (*compiled, *timed) if "error" in answer]
    _report([answer for answer in timed if "ms" in answer], failed, given.out)


def configurations(shape: tuple[int, int, int, int, bool], limit: int | None) -> list[dict[str, Any]]:
    """Every configuration whose tiles fit into shared memory and whose sums fit into registers, all passes."""
    dim = shape[3]
    found: list[dict[str, Any]] = []
    for which in PASSES:
        if (dim == 256 and which == "dkdv") or (dim < 256 and which in ("dk", "dv")):
            continue
        several = []
        for m, n, warps, stages, tma, overlap in itertools.product(
            (32, 64, 128, 256), (32, 64, 128), (4, 8), (1, 2, 3, 4), (True, False), (False, True)
        ):
            if which == "forward":
                registers = m * dim + m * n * (1.5 if overlap else 1)
                shared = 2 * (m * dim + stages * 2 * n * dim)
                keep = m >= 64 and n >= 64 // (1 + dim // 256) and stages > 1
            elif which == "dq":
                registers = m * dim + 2 * m * n
                shared = 2 * (2 * m * dim + stages * 2 * n * dim)
                keep = 64 <= m <= 128 and not overlap
            else:
                registers = n * dim * (2 if which == "dkdv" else 1) + 2 * m * n
                shared = 2 * (2 * n * dim + stages * 2 * m * dim)
                keep = n >= 64 and m <= 128 and not overlap
            # Pointers are there to compare with: only where registers are not the question.
            keep &= tma or stages == 2
            per_thread = registers / (warps * 32)
            if keep and shared <= SHARED_BYTES and 24 <= per_thread <= 236:
                several.append(
                    {"shape": shape, "pass": which, "m": m, "n": n, "warps": warps, "stages": stages}
                    | {"tma": tma, "overlap": overlap}
                )
        found += several[:limit]
    return found


def _check(given: argparse.Namespace, deadline: float) -> None:
    answers = _in_children("check", [{"check": index} for index in range(len(CHECKS))], 8, deadline)
    print("relative errors against float64 (out, dq, dk, dv), the same for PyTorch's eager formula in the case's dtype")
    for answer in sorted(answers, key=lambda answer: answer["check"]):
        dtype, *sizes = CHECKS[answer["check"]]
        print(" ", dtype, *sizes[:7], sizes[7], sizes[8], answer.get("errors", answer.get("error")), flush=True)


def _in_children(kind: str, tasks: list[dict[str, Any]], processes: int, deadline: float) -> list[dict[str, Any]]:
    """Each task's answer, from workers that are started anew, past the task that killed them, until `deadline`."""
    answers: list[dict[str, Any]] = []

    def serve(mine: list[dict[str, Any]]) -> None:
        while mine and time.time() < deadline:
            command = [sys.executable, __file__, "--worker", kind, "--deadline", str(deadline)]
            with tempfile.TemporaryFile("w+") as trouble:
                child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=trouble, text=True
                )
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write("\n".join(map(json.dumps, mine)))
                child.stdin.close()
                done = 0
                # A kernel that hangs would otherwise never be noticed.
                killer = _kill_later(child, 40)
                for line in child.stdout:
                    killer.cancel()
                    if line.startswith("{"):
                        answers.append(json.loads(line))
                        done += 1
                    killer = _kill_later(child, 15 if kind == "measure" else 60)
                code = child.wait()
                killer.cancel()
                trouble.seek(0)
                last_message = trouble.read()[-400:]
            mine = mine[done:]
            if mine and code != 0:
                answers.append(mine[0] | {"error": f"the process ended with {code}: {last_message}"})
                mine = mine[1:]
            elif done == 0:
                return

    shares = [tasks[index::processes] for index in range(processes)]
    threads = [threading.Thread(target=serve, args=(share,)) for share in shares if share]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _kill_later(child: Any, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    return timer


def _work(kind: str, deadline: float) -> None:
    todo = [json.loads(line) for line in sys.stdin]
    work = {"check": _check_one, "compile": _compile_one, "measure": _measure_one}[kind]
    for task in todo:
        if time.time() > deadline:
            return
        try:
            answer = task | work(task)
        except Exception as error:
            answer = task | {"error": f"{type(error).__name__}: {error}"[:300]}
            if "CUDA error" in str(error) or "illegal" in str(error):
                print(json.dumps(answer), flush=True)
                os._exit(0)
        print(json.dumps(answer), flush=True)


def _launch(task: dict[str, Any], tensors: dict[str, Any]) -> None:
    from attn_exp.kernels import launch, tuning

    kernel = {"forward": launch.forward_kernel, "dq": launch.dq_kernel}.get(task["pass"], launch.dkdv_kernel)
    config = tuning.make_config(kernel, task["m"], task["n"], task["warps"], task["stages"], task["overlap"])
    t, dim = tensors, task["shape"][3]
    scores = launch.Scores(scale=dim**-0.5, causal=task["shape"][4], offset=0, window=None, softcap=None)
    how: dict[str, Any] = {"config": config, "tma": task["tma"]}
    qkv = (t["q"], t["k"], t["v"])
    if task["pass"] == "forward":
        launch.launch_forward(*qkv, t["out"], t["lse"], scores, **how)
    elif task["pass"] == "dq":
        launch.launch_dq(*qkv, t["d_out"], t["lse"], t["delta"], t["dq"], scores, **how)
    else:
        wanted = {"want_dk": "dk" in task["pass"], "want_dv": "dv" in task["pass"]}
        launch.launch_dkdv(*qkv, t["d_out"], t["lse"], t["delta"], t["dk"], t["dv"], scores, **how, **wanted)


def _empty_tensors(shape: list[Any], device: str) -> dict[str, Any]:
    import torch

    batch, heads, length, dim, _ = shape
    wide = {
        name: torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device=device)
        for name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
    }
    rows = {name: torch.empty(batch, heads, length, device=device) for name in ("lse", "delta")}
    return wide | rows


def _compile_one(task: dict[str, Any]) -> dict[str, Any]:
    """Compile into Triton's cache for the H200's architecture, from tensors without memory; no GPU is asked."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Hopper:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(Hopper())
    from attn_exp.kernels import launch, tuning

    made = []

    def compile_only(kernel: Any, config: Any, grid: Any, **arguments: Any) -> None:
        options = config.all_kwargs()
        tuning.fit_blocks(arguments | options)
        made.append(kernel.warmup(**arguments, **options, grid=(1,)))

    launch._run = compile_only
    began = time.monotonic()
    _launch(task, _empty_tensors(task["shape"], "meta"))
    took = time.monotonic() - began
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(made[0].asm["ptx"])
        source.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    return {
        "registers": int(registers[1]) if registers else -1,
        "spills": int(spills[1]) if spills else -1,
        "serialized": "serialized" in said,
        "shared": made[0].metadata.shared,
        "compile_s": round(took, 2),
    }


_kept: dict[str, Any] = {}


def _measure_one(task: dict[str, Any]) -> dict[str, Any]:
    """The median of 10 calls, enqueued behind a pause so that the GPU never waits for Python.

    Results must be those of a plain configuration, and the same bits every time.
    """
    import torch

    from attn_exp.kernels import launch, tuning

    shape = task["shape"]
    if _kept.get("shape") != shape:
        _kept.clear()
        tensors = _empty_tensors(shape, "cuda")
        for name in ("q", "k", "v", "d_out"):
            tensors[name].normal_()
        scores = launch.Scores(scale=shape[3] ** -0.5, causal=shape[4], offset=0, window=None, softcap=None)
        kernel = launch.forward_kernel
        launch.launch_forward(
            *(tensors[name] for name in ("q", "k", "v", "out", "lse")),
            scores,
            config=tuning.make_config(kernel, 64, 64, 4, 2),
            tma=False,
        )
        rows_ms = _time(lambda: launch.launch_rows(tensors["out"], tensors["d_out"], tensors["lse"]))
        lse, delta = launch.launch_rows(tensors["out"], tensors["d_out"], tensors["lse"])
        _kept.update(shape=shape, tensors=tensors | {"lse": lse, "delta": delta}, rows_ms=rows_ms)
        plain = {"shape": shape, "m": 32, "n": 32, "warps": 4, "stages": 1, "tma": False, "overlap": False}
        for which in ("forward", "dk", "dv", "dq"):
            _launch(plain | {"pass": which}, _kept["tensors"])
        _kept["plain"] = {name: _kept["tensors"][name].float() for name in ("out", "dk", "dv", "dq")}
    filled = {"forward": ["out"], "dkdv": ["dk", "dv"]}.get(task["pass"], [task["pass"]])
    for name in filled:
        _kept["tensors"][name].fill_(float("nan"))
    _launch(task, _kept["tensors"])
    first = [_kept["tensors"][name].clone() for name in filled]
    ms = _time(lambda: _launch(task, _kept["tensors"]))
    for name, tensor in zip(filled, first, strict=True):
        plain = _kept["plain"][name]
        difference = ((tensor.float() - plain).norm() / plain.norm()).item()
        if not difference < 4e-3:
            raise ValueError(f"{name} differs from the plain kernel's by {difference:.2g}")
        if not torch.equal(tensor, _kept["tensors"][name]):
            raise ValueError(f"{name} has other bits when repeated")
    if task["pass"] == "forward":
        # The padded rows have the forward's own shape at these lengths, so they were overwritten by the same numbers.
        assert torch.isfinite(_kept["tensors"]["lse"]).all()
    return {"ms": ms, "rows_ms": _kept["rows_ms"]}


def _time(call: Any, calls: int = 10) -> float:
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[calls // 2]


_originals: dict[str, Any] = {}


def _check_one(task: dict[str, Any]) -> dict[str, Any]:
    import torch

    from attn_exp.kernels import launch, tuning
    from attn_exp.kernels.triton_attention import attention

    # Empty tensors come filled with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    dtype_name, batch, q_heads, kv_heads, q_len, kv_len, dim, value_dim, options, how = CHECKS[task["check"]]
    # The case before, in the same process, may have changed both.
    known = _originals.setdefault("configs_of", tuning.configs_of)
    tuning.configs_of = known if how == "autotuned" else lambda *arguments: known(*arguments)[:1]
    reads = _originals.setdefault("tma_reads", launch.tma_reads)
    launch.tma_reads = (lambda tensor: False) if how == "pointers" else reads
    if how == "overlap":
        tuning.configs_of = lambda kernel, *_: [
            tuning.make_config(kernel, 64, 128, 8, 2)
            if kernel is launch.dkdv_kernel
            else tuning.make_config(kernel, 128, 128, 8, 2, True)
        ]
    tuning.autotuned.cache_clear()
    dtype = getattr(torch, dtype_name)

    def normal(heads: int, length: int, width: int) -> Any:
        if how == "bshd":
            return torch.randn(batch, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.randn(batch, heads, length, width, device="cuda", dtype=dtype)

    q, k, v = normal(q_heads, q_len, dim), normal(kv_heads, kv_len, dim), normal(kv_heads, kv_len, value_dim)
    d_out = normal(q_heads, q_len, value_dim)
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def ours() -> list[Any]:
        out = attention(q, k, v, **options)
        return [out, *torch.autograd.grad(out, (q, k, v), d_out)]

    found = ours()
    again = ours()
    same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    exact = _formula(q, k, v, d_out, torch.float64, options)
    eager = _formula(q, k, v, d_out, dtype, options)
    told = " ".join(f"{_error(one, true):.2g}" for one, true in zip(found, exact, strict=True))
    usual = " ".join(f"{_error(one, true):.2g}" for one, true in zip(eager, exact, strict=True))
    return {"errors": f"{told} (eager {usual}) {'same bits' if same else 'OTHER BITS'}"}


def _error(found: Any, exact: Any) -> float:
    # Where the gradient is nothing but rounding (a single key), against the inputs' unit scale.
    norm = max(exact.norm().item(), 1e-5 * exact.numel() ** 0.5)
    return float((found.double() - exact).norm().item() / norm)


def _formula(q: Any, k: Any, v: Any, d_out: Any, dtype: Any, options: dict[str, Any]) -> list[Any]:
    """softmax(q kT) v and its gradients, head by head."""
    import torch

    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v))
    group, outs = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].mT * q.shape[-1] ** -0.5
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if options.get("causal"):
            offset = options.get("offset", k.shape[2] - q.shape[2])
            last = torch.arange(q.shape[2], device="cuda")[:, None] + offset
            key = torch.arange(k.shape[2], device="cuda")[None]
            hidden = (key > last) | (key <= last - options.get("window", 1 << 40))
            lowest = torch.finfo(dtype).min
            weights = torch.softmax(scores.masked_fill(hidden, lowest), -1).masked_fill(hidden, 0)
        else:
            weights = torch.softmax(scores, -1)
        outs.append(weights @ v[:, head // group])
    out = torch.stack(outs, 1)
    return [out, *torch.autograd.grad(out, (q, k, v), d_out.to(dtype))]


def _report(timed: list[dict[str, Any]], failed: list[dict[str, Any]], folder: Path) -> None:
    path = folder / "triton_tune.csv"
    columns = ["shape", "pass", "m", "n", "warps", "stages", "tma", "overlap", "ms", "tflops"]
    columns += ["registers", "spills", "serialized", "shared", "compile_s", "rows_ms", "error"]
    for task in timed:
        batch, heads, length, dim, causal = task["shape"]
        work = 4 * batch * heads * length**2 * dim / (2 if causal else 1) / 1e9
        # Of a backward kernel: what the whole backward would reach if it took only this kernel's time.
        task["tflops"] = round(work * (1 if task["pass"] == "forward" else 2.5) / task["ms"], 1)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(
            sorted(timed + failed, key=lambda task: (str(task["shape"]), task["pass"], task.get("ms", 1e9)))
        )
    reasons: dict[str, int] = {}
    for task in failed:
        reasons[task["error"][:120]] = reasons.get(task["error"][:120], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:5]:
        print(f"{count} failed: {reason}")
    for shape in SHAPES:
        batch, heads, length, dim, causal = shape
        print(f"\nb{batch} h{heads} s{length} d{dim} {'causal' if causal else 'full'}")
        best: dict[str, float] = {}
        mine = [task for task in timed if tuple(task["shape"]) == shape]
        for which in PASSES:
            ranked = sorted((task for task in mine if task["pass"] == which), key=lambda task: task["ms"])
            if ranked:
                best[which] = ranked[0]["ms"]
            # The best five, and the best of those that are made otherwise.
            shown = ranked[:5] + [
                next((task for task in ranked[5:] if task[name] != ranked[0][name]), None)
                for name in ("tma", "overlap")
                if ranked and all(task[name] == ranked[0][name] for task in ranked[:5])
            ]
            for task in filter(None, shown):
                print(
                    f"  {which:8} {task['m']:3}x{task['n']:<3} warps {task['warps']} stages {task['stages']} "
                    f"{'tma' if task['tma'] else 'ptr'} {'overlap' if task['overlap'] else '       '} "
                    f"{task['ms']:.3f} ms {task['tflops']:6.1f} TFLOPS  regs {task['registers']} "
                    f"spill {task['spills']}{' serialized' if task['serialized'] else ''}"
                )
        if "dq" in best and ("dkdv" in best or {"dk", "dv"} <= best.keys()):
            both = min(best.get("dkdv", 1e9), best.get("dk", 1e9) + best.get("dv", 1e9))
            total = mine[0]["rows_ms"] + both + best["dq"]
            work = 10 * batch * heads * length**2 * dim / (2 if causal else 1) / 1e9
            print(f"  backward in all {total:.3f} ms (rows {mine[0]['rows_ms']:.3f}) {work / total:.1f} TFLOPS")
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
