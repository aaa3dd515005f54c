"""What `explain` says of the machine: always what it did, and a setting only where it matters."""

from dataclasses import replace

import fakes
import pytest

from attn_exp.core.record.window import Window
from attn_exp.explain.conditions import condition_lines

WINDOW = Window(
    source="nvml", readings=40, seconds=0.8, call_share=0.9, clock_mhz=1695.0, clock_low_mhz=1650.0,
    clock_high_mhz=1980.0, memory_clock_mhz=3201.0, temperature_c=61.0, power_w=643.21, power_error=0.012,
    energy_from="counter", reasons={"sw_power_cap": 0.8},
)  # fmt: skip
GPU = {"gpu": "NVIDIA H200", "ecc": True, "max_memory_clock_mhz": 3201, "gpu_numa_node": 0, "numa_nodes": "0"}
MIB = 1 << 20


def lines(environment=None, device="cuda", dtype="bfloat16", notes=None, metrics=None, **measured):
    timing = fakes.make_timing(notes=notes or {"load_s": 0.9})
    record = fakes.make_record(
        environment=GPU if environment is None else environment, metrics={"forward/time_us": 11.0} | (metrics or {})
    )
    request = replace(record.request, device=device, case=replace(record.request.case, dtype=dtype))
    bare = replace(record.passes["forward"], peak_memory_bytes=None, timings=(timing,))
    return condition_lines(replace(record, request=request, passes={"forward": replace(bare, **measured)}))


def test_the_window_is_one_line():
    metrics = {"forward/joules_per_call": 0.1721, "forward/tflops_per_watt": 1.16}
    assert lines(window=WINDOW, metrics=metrics) == [
        "fwd: clock 1,695 MHz (1,650 to 1,980), memory 3,201 MHz, 61 C, 643.2 W (+-1.2 %) counter, 0.1721 J a call, "
        "1.160 TFLOPS/W, sw_power_cap in 80 % of readings"
    ]
    assert "no energy of a call, since calls took 30 % of that time" in lines(window=replace(WINDOW, call_share=0.3))[0]


def test_the_reason_for_a_missing_reading_is_shown():
    assert lines(window=Window(note="Linux shows no frequency of this processor")) == [
        "fwd: Linux shows no frequency of this processor"
    ]
    assert lines() == [], "older records say nothing"


def test_memory_is_one_line():
    sizes = {"peak_memory_bytes": 200 * MIB, "workspace_bytes": 16 * MIB, "outside_memory_bytes": 512 * MIB}
    assert lines(**sizes) == [
        "fwd: 200.0 MiB memory of the call, 16.0 MiB of it workspace, 512.0 MiB outside of PyTorch's allocator"
    ]
    assert lines(workspace_bytes=16 * MIB) == ["fwd: 16.0 MiB workspace"]
    assert lines(peak_memory_bytes=MIB, outside_memory_bytes=0) == ["fwd: 1.0 MiB memory of the call"]


def test_rounds_that_depend_on_each_other_are_said():
    figures = {"forward/rounds": 40.0, "forward/round_autocorrelation": 0.71}
    assert lines(metrics=figures | {"forward/effective_rounds": 6.8}) == [
        "fwd: 40 rounds say as much as 6.8 independent ones (autocorrelation 0.71)"
    ]
    assert lines(metrics=figures | {"forward/effective_rounds": 30.0}) == []


@pytest.mark.parametrize(
    ("changed", "dtype", "words"),
    [
        ({"ecc": False}, "bfloat16", "the GPU's memory corrects no errors (ECC is off)"),
        ({"matmul_tf32": True}, "float32", "PyTorch multiplies float32 matrices in TF32"),
        ({"matmul_tf32": True}, "bfloat16", None),
        ({"bf16_reduced_precision_reduction": False}, "bfloat16", "PyTorch's bfloat16 products add in float32 only"),
        ({"gpu_numa_node": 1}, "bfloat16", "the worker ran on memory node 0, and the GPU is attached to node 1"),
        ({"gpu_numa_node": 1, "numa_nodes": "0-1"}, "bfloat16", None),
    ],
)
def test_a_gpus_setting_is_said_where_it_matters(changed, dtype, words):
    found = lines(GPU | changed, dtype=dtype)
    assert (found == []) if words is None else (len(found) == 1 and found[0].startswith(words)), found


def test_a_memory_clock_below_the_highest_is_said():
    slow = replace(WINDOW, memory_clock_mhz=2619.0)
    assert "the memory's clock was 2,619 MHz of 3,201" in lines(window=slow)
    assert len(lines(window=WINDOW)) == 1


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"cpu_governor": "powersave"}, "the processor's governor was powersave, which may change its clock"),
        ({"cpu_governor": "performance"}, None),
        ({"cpu_affinity": "0-1", "cpu_threads": 8}, "8 threads shared the processors 0-1"),
        ({"numa_nodes": "0-1"}, "the threads could run on several memory nodes, 0-1"),
        (
            {"cpu_capability": "AVX2", "cpu_instruction_sets": "avx2 avx512f"},
            "PyTorch used AVX2, and the processor has",
        ),
    ],
)
def test_a_processors_setting_is_said_where_it_matters(facts, words):
    found = lines(facts, device="cpu", dtype="float32")
    assert (found == []) if words is None else (len(found) == 1 and found[0].startswith(words)), found


def test_building_the_mask_is_one_line():
    metrics = {"forward/mask_build_of_call": 2.4}
    assert lines(metrics=metrics, mask_build_us=3120.4, mask_build_bytes=64 * MIB) == [
        "fwd: building the mask takes 3120 us and 64.0 MiB, the time of 2.400 calls"
    ]
    assert lines(mask_build_us=12.0) == ["fwd: building the mask takes 12.00 us"]
