"""The setting of a job and the moments of its rounds, whether they matter for this job or not."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from attn_exp.core.record import PassRecord, Record
from attn_exp.core.text import SHORT, figures


def setting_lines(record: Record) -> list[str]:
    """Return a line on when and after what load each pass was sampled, and one on each part of the setting."""
    lines = [
        f"{SHORT.get(direction, direction)}: {sampled}"
        for direction, measured in record.passes.items()
        if (sampled := _sampled(record, direction, measured))
    ]
    facts = record.environment
    parts = {"GPU": _gpu(facts), "matrix products": _products(facts), "processor": _processor(facts)}
    changed = facts.get("changed_settings") or {}
    parts["changed by the backend"] = ", ".join(f"{name} {value}" for name, value in sorted(changed.items()))
    return lines + [f"{name}: {line}" for name, line in parts.items() if line]


def _sampled(record: Record, direction: str, measured: PassRecord) -> str:
    """`24 rounds, autocorrelation 0.10, worth 19.1 independent ones, 23:59:42.752 to 23:59:47.980 UTC, ...`."""
    if not measured.timings:
        return ""
    timing = measured.timings[0]
    named = (("rounds", "{:.0f} rounds"), ("round_autocorrelation", "autocorrelation {:.2f}"),
             ("effective_rounds", "worth {:.1f} independent ones"))  # fmt: skip
    known = ((form, record.metrics.get(f"{direction}/{name}")) for name, form in named)
    parts = [form.format(value) for form, value in known if value is not None]
    if timing.blocks:
        parts.append(f"{_time_of_day(timing.blocks[0][1])} to {_time_of_day(timing.blocks[-1][2])} UTC")
    load_s = timing.notes.get("load_s")
    parts.append(f"{figures(load_s)} s of load before" if load_s is not None else "")
    parts.append(f"{figures(measured.rest_s)} s of rest before that" if measured.rest_s is not None else "")
    return ", ".join(filter(None, parts))


def _time_of_day(moment: float) -> str:
    """The time of day, to the millisecond; the record has microseconds."""
    return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S.%f")[:-3]


def _gpu(facts: Mapping[str, Any]) -> str:
    highest = [
        f"{facts[name]:,.0f}" for name in ("max_sm_clock_mhz", "max_memory_clock_mhz") if facts.get(name) is not None
    ]
    parts = [
        f"power limit {facts['power_limit_w']:,.0f} W" if facts.get("power_limit_w") is not None else "",
        f"highest clocks {' and '.join(highest)} MHz" if highest else "",
        _switch("ECC", facts.get("ecc")),
        _switch("MIG", facts.get("mig")),
        f"memory node {facts['gpu_numa_node']}" if facts.get("gpu_numa_node") is not None else "",
        str(facts.get("nvml") or ""),
    ]
    return ", ".join(filter(None, parts))


def _products(facts: Mapping[str, Any]) -> str:
    parts = [
        f"float32 {facts['matmul_precision']}" if facts.get("matmul_precision") else "",
        _switch("TF32", facts.get("matmul_tf32")),
        _switch("TF32 in cuDNN", facts.get("cudnn_tf32")),
        _switch("sums of bf16 in bf16", facts.get("bf16_reduced_precision_reduction")),
        _switch("sums of fp16 in fp16", facts.get("fp16_reduced_precision_reduction")),
    ]
    return ", ".join(filter(None, parts))


def _processor(facts: Mapping[str, Any]) -> str:
    """`2 threads on 0-3 (memory node 0), governor performance, AVX512 of avx avx2 avx512f`."""
    threads = facts.get("cpu_threads")
    node = f" (memory node {facts['numa_nodes']})" if facts.get("numa_nodes") else ""
    where = f" on processors {facts['cpu_affinity']}{node}" if facts.get("cpu_affinity") else ""
    chosen = " of ".join(filter(None, (facts.get("cpu_capability"), facts.get("cpu_instruction_sets"))))
    parts = [
        f"{threads} thread{'s' * (threads != 1)}{where}" if threads is not None else where.strip(),
        f"governor {facts.get('cpu_governor') or 'unknown'}" if threads is not None else "",
        chosen,
    ]
    return ", ".join(filter(None, parts))


def _switch(name: str, value: bool | None) -> str:
    return "" if value is None else f"{name} {'on' if value else 'off'}"
