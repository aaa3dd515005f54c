"""Makes records of made-up jobs, for tests of what reads them. No torch, no measuring, the same numbers every time."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_exp.config.request import _identity
from attn_exp.core.case.case import Case
from attn_exp.core.case.flops import flops
from attn_exp.core.record.file import write_record
from attn_exp.core.record.record import Kernel, PassRecord, Record, Timing
from attn_exp.core.record.request import Compile, Measuring, Request
from attn_exp.results.read import Sweep, read_folder

CASE = Case(
    batch=4, q_heads=16, kv_heads=16, q_len=1024, kv_len=1024, head_dim=128, value_dim=128, dtype="bfloat16",
    causal=True,
)  # fmt: skip
MEASURING = Measuring(
    timer="device",
    also=("kernel", "event"),
    precision=0.005,
    min_rounds=7,
    max_rounds=40,
    budget_s=0.1,
    regime="sustained",
    passes=("forward", "backward"),
    seed=123,
)
H200 = {
    "host": "node1",
    "cpu": "Xeon",
    "gpu": "NVIDIA H200",
    "gpu_uuid": "GPU-1",
    "power_limit_w": 700.0,
    "driver": "580.1",
    "cuda": "13.0",
    "versions": {"torch": "2.11.0"},
    "inputs": "normal(0, 1)",
    "gradients_enabled": True,
    "event_floor_us": 1.28,
}
# 2026-03-01 12:00 UTC
NOON = 1772366400.0


def case(**changes: Any) -> Case:
    """The case of this file with changes; `seq_len` sets both lengths."""
    if "seq_len" in changes:
        changes["q_len"] = changes["kv_len"] = changes.pop("seq_len")
    return replace(CASE, **changes)


def job(
    backend: str = "flash",
    fwd_us: float = 100.0,
    bwd_us: float | None = 250.0,
    *,
    of: Case = CASE,
    half: float = 0.003,
    options: dict[str, Any] | None = None,
    measuring: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """An ok record with these medians, whose intervals are +-`half`; `bwd_us=None` measures the forward alone."""
    times = {"forward": fwd_us} | ({"backward": bwd_us} if bwd_us is not None else {})
    asked = replace(MEASURING, passes=tuple(times), **measuring or {})
    config = {"_target_": f"attn_exp.backends.sdpa.{backend.title()}", "name": backend} | (options or {})
    device = changes.pop("device", "cuda")
    model = changes.pop("model", "sdpa_bench")
    compiled = changes.pop("compile", Compile())
    request = Request(
        job="named-below",
        sweep="s",
        model=model,
        device=device,
        case=of,
        backend=config,
        measuring=asked,
        compile=compiled,
        label=f"{backend} {of.label()}",
    )
    job_name = f"{re.sub('[^A-Za-z0-9.-]', '', backend)}-{_identity(request)}".lstrip("-.")
    request = replace(request, job=job_name)
    metrics: dict[str, float] = {}
    passes = {}
    for name, us in times.items():
        rate = flops(of, name) / us / 1e6
        metrics |= {
            f"{name}/time_us": us,
            f"{name}/time_low_us": us * (1 - half),
            f"{name}/time_high_us": us * (1 + half),
            f"{name}/time_half_width": half,
            f"{name}/tflops": rate,
            f"{name}/kernel_time_us": us * 0.97,
            f"{name}/flops_of_measured": rate / 720,
            f"{name}/bandwidth_of_measured": 0.1,
            f"{name}/peak_memory_bytes": 1e9,
            f"{name}/error_out": 2e-3,
        }
        timing = Timing(timer=asked.timer, l2="cold", times_us=(us,), rounds=(0,), stop_reason="precise")
        kernels = (Kernel(name=f"{backend}_{name}", count=1.0, time_us=us),)
        passes[name] = PassRecord(kernels=kernels, timings=(timing,))
    filled: dict[str, Any] = {
        "request": request,
        "status": "ok",
        "passes": passes,
        "metrics": metrics,
        "environment": H200,
        "started_at": NOON,
        "finished_at": NOON + 1,
    }
    return Record(**filled | changes)


def failed(
    status: str = "unsupported", backend: str = "flash", reason: str = "no kernel for it", **more: Any
) -> Record:
    """A record of a job that left no numbers."""
    return replace(job(backend, **more), status=status, reason=reason, metrics={}, passes={})  # type: ignore[arg-type]


def write(folder: Path, records: Iterable[Record]) -> Path:
    """A sweep's folder with these records; the sweep has the folder's name."""
    for record in records:
        own = folder / record.request.job
        own.mkdir(parents=True, exist_ok=True)
        write_record(replace(record, request=replace(record.request, sweep=folder.name)), own)
    return folder


def sweep(folder: Path, records: Iterable[Record]) -> Sweep:
    """The same, read."""
    return read_folder(write(folder, records))
