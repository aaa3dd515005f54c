"""Records with something in every field that a reader shows, for tests of what is strange in one of them."""

from dataclasses import replace

from attn_exp.core.record.checked import Form, Judged, TensorError
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.core.record.record import CompileRecord, Disagreement, PassRecord, Record, Traced
from attn_exp.core.record.window import Window

_ENVIRONMENT = {
    "cudnn": 91900,
    "git_commit": "abc",
    "variables": {"OMP_NUM_THREADS": "1"},
    "numa_nodes": "0-1",
    "gpu_numa_node": 0,
    "cpu_affinity": "0-1",
    "cpu_threads": 2,
    "max_sm_clock_mhz": 1980,
    "max_memory_clock_mhz": 3201,
    "ecc": False,
    "matmul_precision": "highest",
    "matmul_tf32": False,
    "cudnn_tf32": True,
    "bf16_reduced_precision_reduction": True,
    "fp16_reduced_precision_reduction": False,
    "cpu_governor": "powersave",
    "cpu_capability": "AVX512",
    "cpu_instruction_sets": "avx2 avx512f",
    "changed_settings": {"flash_sdp": "False"},
}
_METRICS = {
    "rounds": 20.0,
    "effective_rounds": 5.0,
    "round_autocorrelation": 0.5,
    "joules_per_call": 0.1,
    "power_w": 600.0,
    "power_error": 0.01,
    "tflops_per_watt": 1.0,
    "clock_mhz": 1980.0,
    "memory_clock_mhz": 3000.0,
    "peak_memory_bytes": 4096.0,
    "workspace_bytes": 10.0,
    "outside_memory_bytes": 5.0,
}


def rich(record: Record) -> Record:
    """Return an ok record of `sweeps.job` with everything else that a record on a GPU has."""
    passes = {name: _rich_pass(name, measured) for name, measured in record.passes.items()}
    kernel = ProfiledKernel(direction="forward", name="flash_fwd", count=1.0, time_us=9.0, figures={"registers": 255})
    return replace(
        record,
        passes=passes,
        environment={**record.environment, **_ENVIRONMENT},
        metrics=record.metrics | {f"{name}/{one}": value for name in passes for one, value in _METRICS.items()},
        ceilings={"matmul_flops_per_s": 7e14, "copy_bytes_per_s": 4e12},
        telemetry=({"sm_mhz": 1980, "reasons": ["sw_power_cap"]},),
        stages_s={"inputs": 0.5},
        flags=("drift",),
        notes={"workspace": 1.0},
        compiled=CompileRecord(graphs=1, breaks={"because": 1}, recompilations=0),
        profiles={"torch": Profile(status="ok", reason="r", kernels=(kernel,), metrics={"forward/span_us": 9.0})},
        judged=(
            Judged(
                call="timed", passes=tuple(passes), inputs="normal", index=3, largest_score=4.0, rows=5,
                rows_of=100, heads=2, form={"out": Form(dtype="bfloat16", shape=(1, 2), strides=(2, 1))},
            ),
        ),
    )  # fmt: skip


def _rich_pass(name: str, measured: PassRecord) -> PassRecord:
    (timing,) = measured.timings
    (us,) = timing.times_us
    samples = replace(timing, times_us=(us, us * 1.01, us * 0.99), rounds=(0, 1, 2), blocks=((0, 1.0, 2.0),))
    window = Window(
        source="nvml", readings=5, seconds=1.0, call_share=0.5, clock_mhz=1980.0, clock_low_mhz=1900.0,
        clock_high_mhz=2000.0, memory_clock_mhz=3000.0, temperature_c=60.0, power_w=600.0, energy_j=10.0, energy_s=1.0,
        energy_from="counter", power_error=0.01, reasons={"sw_power_cap": 0.1}, note="a note",
    )  # fmt: skip
    return replace(
        measured,
        first_call_s=0.25,
        peak_memory_bytes=4096,
        workspace_bytes=10,
        outside_memory_bytes=5,
        errors={"out": TensorError(relative=1e-3, worst_row=2e-3, max_abs=0.1, tolerance=0.01)},
        timings=(samples, replace(samples, timer="kernel")),
        activity=Traced(sum_us=9.0, union_us=9.0, span_us=9.0, streams=(7,)),
        disagreements=(Disagreement(one="device", other="kernel", one_us=1.0, other_us=2.0, low=0.1, high=0.2),),
        window=window,
        flags=("drift",),
    )
