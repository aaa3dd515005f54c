"""The pages and lines of `explain` that tests/golden holds: each setting, condition and judgement that they tell."""

from dataclasses import replace
from pathlib import Path

import fakes
import sweeps

from attn_exp.core.record.checked import Judged
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.core.record.record import Kernel, PassRecord
from attn_exp.core.record.window import Window
from attn_exp.explain.conditions import condition_lines, judged_lines
from attn_exp.explain.find import find
from attn_exp.explain.page import job_page, sweep_page

CEILINGS = {"matmul_flops_per_s": 720e12, "copy_bytes_per_s": 4e12}
STALLS = {"forward/stall_wait_share": 0.2, "forward/stall_gmma_share": 0.5, "forward/stall_selected_share": 0.9}
SHARED_KERNEL = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
WINDOW = Window(
    source="nvml", readings=40, seconds=0.8, call_share=0.9, clock_mhz=1695.0, clock_low_mhz=1650.0,
    clock_high_mhz=1980.0, memory_clock_mhz=3201.0, temperature_c=61.0, power_w=643.21, power_error=0.012,
    energy_from="counter", reasons={"sw_power_cap": 0.8},
)  # fmt: skip
GPU = {"gpu": "NVIDIA H200", "ecc": True, "max_memory_clock_mhz": 3201, "gpu_numa_node": 0, "numa_nodes": "0"}
MIB = 1 << 20


def job(backend, us, **more):
    record = sweeps.job(backend, us, None, ceilings=CEILINGS, **more)
    return replace(record, metrics=record.metrics | {"forward/min_bytes": 1e8, "forward/gb_per_s": 1e5 / us})


def with_kernel(record, name):
    measured = replace(record.passes["forward"], kernels=(Kernel(name=name, count=1.0, time_us=90.0),))
    return replace(record, passes={"forward": measured})


def first():
    """Two backends of one kernel, the slower `flash` with profiles, and one that could not run."""
    kernel = ProfiledKernel(
        direction="forward", name="flash_fwd<1>(int)", count=2, time_us=110.0,
        figures={"grid": "132x1x1", "registers": 168.0, "tflops": 300.5, "gap_before_us": 30.0, "occupancy": 0.125},
    )  # fmt: skip
    profiles = {
        "torch": Profile(status="ok", seconds=1.5, kernels=(kernel,), files=("profiles/torch/trace.json",),
                         metrics={"forward/kernel_time_us": 110.0, "forward/tflops": 312.5}),
        "proton": Profile(status="unavailable", reason="triton is not installed: pip install triton"),
        "ncu": Profile(status="ok", metrics={"forward/dram_bytes": 2e8, **STALLS}),
    }  # fmt: skip
    return [
        replace(job("flash", 120.0, flags=("launch_bound",)), profiles=profiles),
        with_kernel(job("cudnn", 80.0), SHARED_KERNEL),
        with_kernel(job("aten_cudnn", 80.2), SHARED_KERNEL),
        sweeps.failed("unsupported", "fa3", "it is not installed", bwd_us=None),
    ]


def on_cpu():
    """Two that ran one operator that computes attention, and two of which only a wrapper is known."""
    names = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::empty")

    def ran(backend, us, *operators):
        kernels = tuple(Kernel(name=name, count=1.0, time_us=us) for name in operators)
        return replace(job(backend, us, device="cpu"), passes={"forward": PassRecord(kernels=kernels)})

    return [ran("flash", 100.0, *names), ran("auto", 101.0, *names[::-1]), ran("math", 900.0, names[0]),
            ran("mine", 950.0, names[0])]  # fmt: skip


def conditions(environment=None, device="cuda", dtype="bfloat16", metrics=None, **measured):
    record = fakes.make_record(
        environment=GPU if environment is None else environment, metrics={"forward/time_us": 11.0} | (metrics or {})
    )
    request = replace(record.request, device=device, case=replace(record.request.case, dtype=dtype))
    bare = replace(record.passes["forward"], peak_memory_bytes=None, timings=(fakes.make_timing(notes={}),))
    return condition_lines(replace(record, request=request, passes={"forward": replace(bare, **measured)}))


def judgements(source=None, **changes):
    """What is said of four judged calls, of which each has these changes."""
    both, changed = ("forward", "backward"), "normal(0, 1), signs changed"
    judged = (
        Judged(
            call="first", passes=both, inputs="normal(0, 1)", largest_score=5.25, rows=65536, rows_of=65536, heads=4
        ),
        Judged(call="hard", passes=both, inputs="hard", largest_score=93.1, rows=65536, rows_of=65536, heads=64),
        Judged(call="timed", passes=("forward",), index=3, inputs=changed, rows=2048, rows_of=65536, heads=64),
        Judged(call="timed", passes=("backward",), index=1, inputs=changed, rows=65536, rows_of=65536, heads=64),
    )
    made = sweeps.job("mine")
    request = replace(made.request, source=source or {})
    return judged_lines(replace(made, judged=tuple(replace(one, **changes) for one in judged), request=request))


def lines():
    """Return the lines about each condition, by what is special about it."""
    window = {"metrics": {"forward/joules_per_call": 0.1721, "forward/tflops_per_watt": 1.16}, "window": WINDOW}
    rounds = {"forward/rounds": 40.0, "forward/round_autocorrelation": 0.71}
    cpu = {"device": "cpu", "dtype": "float32"}
    avx = {"cpu_capability": "AVX2", "cpu_instruction_sets": "avx2 avx512f"}
    source = {"module": "pkg.mine", "sha256": "1a2b3c4" + "f" * 57, "files": "3", "commit": "c" * 40, "changes": "none"}
    return {
        "nothing": conditions(),
        "window": conditions(**window),
        "calls took a part of the window": conditions(window=replace(WINDOW, call_share=0.3)),
        "no reading": conditions(window=Window(note="Linux shows no frequency of this processor")),
        "memory": conditions(peak_memory_bytes=200 * MIB, workspace_bytes=16 * MIB, outside_memory_bytes=512 * MIB),
        "workspace": conditions(workspace_bytes=16 * MIB),
        "no memory outside": conditions(peak_memory_bytes=MIB, outside_memory_bytes=0),
        "mask": conditions(metrics={"forward/mask_build_of_call": 2.4}, mask_build_us=3120.4, mask_build_bytes=MIB),
        "mask without size": conditions(mask_build_us=12.0),
        "rounds": conditions(metrics=rounds | {"forward/effective_rounds": 6.8}),
        "independent rounds": conditions(metrics=rounds | {"forward/effective_rounds": 30.0}),
        "no ECC": conditions(GPU | {"ecc": False}),
        "TF32": conditions(GPU | {"matmul_tf32": True}, dtype="float32"),
        "TF32 and bfloat16": conditions(GPU | {"matmul_tf32": True}),
        "sums in float32": conditions(GPU | {"bf16_reduced_precision_reduction": False}),
        "another memory node": conditions(GPU | {"gpu_numa_node": 1}),
        "both memory nodes": conditions(GPU | {"gpu_numa_node": 1, "numa_nodes": "0-1"}),
        "slow memory": conditions(window=replace(WINDOW, memory_clock_mhz=2619.0)),
        "governor": conditions({"cpu_governor": "powersave"}, **cpu),
        "best governor": conditions({"cpu_governor": "performance"}, **cpu),
        "threads": conditions({"cpu_affinity": "0-1", "cpu_threads": 8}, **cpu),
        "memory nodes": conditions({"numa_nodes": "0-1"}, **cpu),
        "AVX": conditions(avx, **cpu),
        "judged": judgements(source),
        "overwritten": judgements(overwritten=True),
        "hides NaN": judgements(hides_nan=True),
        "strides refused": judgements(strides_refused=True),
        "strides kept": judgements(strides_kept=True),
        "whole, no score": judgements(largest_score=None, heads=0, rows=65536),
    }


def outputs(folder: Path) -> dict[str, str]:
    """Return the pages of sweeps and jobs, and the lines, by the names of their golden files."""
    found = {"explain/lines.txt": "".join(f"{name}:\n" + "".join(f"  {one}\n" for one in said)
                                          for name, said in lines().items())}  # fmt: skip
    for name, records in (("first", first()), ("cpu", on_cpu())):
        sweep, _ = find(str(sweeps.write(folder / name, records)), folder, None)
        pages = [sweep_page(sweep), *(job_page(one, sweep.results) for one in sweep.results)]
        found[f"explain/{name}.txt"] = "\n\n\n".join(pages).replace(str(folder), "FOLDER") + "\n"
    return found
