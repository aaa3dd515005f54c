"""What a record says of its measurement: the machine meanwhile, memory, settings that matter, and the judgement."""

from collections.abc import Mapping, Sequence
from typing import Any

from attn_exp.core.host.cpu import numbers_of
from attn_exp.core.record.checked import Judged, told
from attn_exp.core.record.record import PassRecord, Record
from attn_exp.core.record.window import Window
from attn_exp.core.source import commit, short
from attn_exp.core.text import SHORT, figures

# Rounds that depend on each other so much that a reader should know.
_FEW_EFFECTIVE = 0.5
_LOWER_MEMORY_CLOCK = 0.98
_MIB = 1 << 20


def condition_lines(record: Record) -> list[str]:
    """Return a line on each pass's window and memory, and one on each setting that matters here."""
    lines = []
    for direction, measured in record.passes.items():
        if not measured.timings:
            continue
        name = SHORT.get(direction, direction)
        several = (
            _window(record, direction, measured), _memory(measured), _mask(record, direction, measured),
            _rounds(record, direction),
        )  # fmt: skip
        lines += [f"{name}: {line}" for line in several if line]
    environment = record.environment
    settings = _gpu(record, environment) if record.request.device == "cuda" else _cpu(environment)
    return [*lines, *settings]


def _window(record: Record, direction: str, measured: PassRecord) -> str:
    """`clock 1,695 MHz (1,650 to 1,980), memory 3,201 MHz, 61 C, 643 W (+-1.2 %), 0.172 J a call, 1.2 TFLOPS/W`."""
    window = measured.window
    if window is None:
        return ""
    parts = [_clock(window)]
    parts.append(f"memory {window.memory_clock_mhz:,.0f} MHz" if window.memory_clock_mhz else "")
    parts.append(f"{window.temperature_c:.0f} C" if window.temperature_c is not None else "")
    if window.power_w is not None:
        error = f" (+-{100 * window.power_error:.1f} %)" if window.power_error is not None else ""
        parts.append(f"{figures(window.power_w)} W{error} {window.energy_from}")
    for metric, unit in (("joules_per_call", "J a call"), ("tflops_per_watt", "TFLOPS/W")):
        value = record.metrics.get(f"{direction}/{metric}")
        parts.append(f"{figures(value)} {unit}" if value is not None else "")
    if window.power_w is not None and f"{direction}/joules_per_call" not in record.metrics:
        parts.append(f"no energy of a call, since calls took {100 * window.call_share:.0f} % of that time")
    parts += [f"{reason} in {100 * share:.0f} % of readings" for reason, share in window.reasons.items()]
    return ", ".join(filter(None, [*parts, window.note]))


def _clock(window: Window) -> str:
    if window.clock_mhz is None or window.clock_low_mhz is None or window.clock_high_mhz is None:
        return ""
    low, high = round(window.clock_low_mhz), round(window.clock_high_mhz)
    between = f" ({low:,} to {high:,})" if low != high else ""
    return f"clock {window.clock_mhz:,.0f} MHz{between}"


def _memory(measured: PassRecord) -> str:
    known = (
        (measured.peak_memory_bytes, "memory of the call"),
        (measured.workspace_bytes, "of it workspace" if measured.peak_memory_bytes is not None else "workspace"),
        (measured.outside_memory_bytes or None, "outside of PyTorch's allocator"),
    )
    return ", ".join(f"{size / _MIB:,.1f} MiB {what}" for size, what in known if size is not None)


def _mask(record: Record, direction: str, measured: PassRecord) -> str:
    if measured.mask_build_us is None:
        return ""
    of_call, size = record.metrics.get(f"{direction}/mask_build_of_call"), measured.mask_build_bytes
    calls = f", the time of {figures(of_call)} calls" if of_call is not None else ""
    memory = f" and {size / _MIB:,.1f} MiB" if size is not None else ""
    return f"building the mask takes {figures(measured.mask_build_us)} us{memory}{calls}"


def _rounds(record: Record, direction: str) -> str:
    rounds, effective, alike = (
        record.metrics.get(f"{direction}/{name}") for name in ("rounds", "effective_rounds", "round_autocorrelation")
    )
    if not rounds or effective is None or alike is None or effective >= _FEW_EFFECTIVE * rounds:
        return ""
    return f"{rounds:.0f} rounds say as much as {effective:.1f} independent ones (autocorrelation {alike:.2f})"


def _gpu(record: Record, facts: Mapping[str, Any]) -> list[str]:
    dtype, lines = record.request.case.dtype, []
    if facts.get("ecc") is False:
        lines.append("the GPU's memory corrects no errors (ECC is off)")
    clocks = [timed.window.memory_clock_mhz for timed in record.passes.values() if timed.window is not None]
    known, highest = [clock for clock in clocks if clock is not None], facts.get("max_memory_clock_mhz")
    if known and highest and min(known) < _LOWER_MEMORY_CLOCK * highest:
        lines.append(f"the memory's clock was {min(known):,.0f} MHz of {highest:,.0f}")
    if dtype == "float32" and facts.get("matmul_tf32"):
        lines.append("PyTorch multiplies float32 matrices in TF32")
    for name, prefix in (("bfloat16", "bf16"), ("float16", "fp16")):
        if dtype == name and facts.get(f"{prefix}_reduced_precision_reduction") is False:
            lines.append(f"PyTorch's {name} products add in float32 only, which is not its default")
    near, nodes = facts.get("gpu_numa_node"), facts.get("numa_nodes")
    if near is not None and nodes is not None and near not in numbers_of(nodes):
        lines.append(f"the worker ran on memory node {nodes}, and the GPU is attached to node {near}")
    return lines


def _cpu(facts: Mapping[str, Any]) -> list[str]:
    lines, governor, nodes = [], facts.get("cpu_governor"), facts.get("numa_nodes")
    if governor not in (None, "performance"):
        lines.append(f"the processor's governor was {governor}, which may change its clock")
    cpus, threads = numbers_of(facts.get("cpu_affinity", "")), facts.get("cpu_threads", 0)
    if cpus and threads > len(cpus):
        lines.append(f"{threads} threads shared the processors {facts['cpu_affinity']}")
    if nodes is not None and len(numbers_of(nodes)) > 1:
        lines.append(f"the threads could run on several memory nodes, {nodes}")
    chosen = str(facts.get("cpu_capability", ""))
    if chosen in ("DEFAULT", "AVX2") and "avx512f" in str(facts.get("cpu_instruction_sets", "")).split():
        lines.append(f"PyTorch used {chosen}, and the processor has AVX512")
    return lines


def judged_lines(record: Record) -> list[str]:
    """Return what is known about how a job was judged; nothing of records from before that was kept."""
    if not record.judged:
        return []
    lines = [_calls(record.judged), _looked_at(record.judged), _source(record), *_bits(record)]
    return [line for line in lines if line]


def _calls(judged: Sequence[Judged]) -> str:
    """`first on normal(0, 1); hard on hard values; timed fwd (block 3) on normal(0, 1), signs changed`."""
    by_inputs: dict[str, list[str]] = {}
    for judgement in judged:
        by_inputs.setdefault(judgement.inputs, []).append(_call(judgement))
    several = [f"{', '.join(calls)} on {inputs}" for inputs, calls in by_inputs.items()]
    return f"calls: {'; '.join(several)}"


def _call(judgement: Judged) -> str:
    if judgement.index is None:
        odd = ["a later forward overwrites the output"] if judgement.overwritten else []
        odd += ["its backward refuses a gradient in another layout"] if judgement.strides_refused else []
        odd += ["its backward is wrong for gradients in two layouts in turn"] if judgement.strides_kept else []
        odd += ["it hides a NaN of the inputs"] if judgement.hides_nan else []
        return f"{judgement.call} ({', '.join(odd)})" if odd else judgement.call
    passes = "+".join(SHORT.get(name, name) for name in judgement.passes)
    return f"{judgement.call} {passes} (block {judgement.index:,})"


def _looked_at(judged: Sequence[Judged]) -> str:
    """How much of the results was compared at least."""
    least = min(judged, key=lambda judgement: judgement.rows / judgement.rows_of if judgement.rows_of else 1.0)
    rows = f"all {least.rows_of:,} rows" if least.rows == least.rows_of else f"{least.rows:,} of {least.rows_of:,} rows"
    heads = f" in {least.heads:,} heads" if least.heads else ""
    scores = [judgement.largest_score for judgement in judged if judgement.largest_score is not None]
    score = f", scores up to {figures(max(scores))}" if scores else ""
    return f"of each: {rows}{heads}{score}"


def _bits(record: Record) -> list[str]:
    """A line for each pass: `same bits, fwd: over calls yes (99 compared); over batch sizes no (...)`."""
    return [f"same bits, {SHORT[name]}: {told(measured.bitwise)}" for name, measured in record.passes.items()
            if measured.bitwise]  # fmt: skip


def _source(record: Record) -> str:
    facts = record.request.source
    if not facts:
        own = str(record.environment.get("git_commit") or "")
        return f"source: attn_exp's own{f', commit {own}' if own else ''}"
    files = f"{facts.get('module', '?')}, {facts.get('files', '?')} file{'s' * (facts.get('files') != '1')}"
    parts = [f"{short(facts)} ({files})", facts.get("package", ""), f"commit {commit(facts)}" if commit(facts) else ""]
    return f"source: {', '.join(filter(None, parts))}"
