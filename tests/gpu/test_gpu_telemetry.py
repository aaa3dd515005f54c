"""On a GPU: the memory of a call by hand, and clock, power and energy beside its timing."""

from dataclasses import replace

import pytest
from test_gpu import SDPA, gpu_case, gpu_request

from attn_exp.worker.measure import measure

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

CASE = gpu_case(batch=4, heads=16, q_len=2048, dim=128)
# bfloat16, batch 4, 16 heads, 2,048 tokens of 128; and a float32 log-sum-exp.
TENSOR, LSE = 2 * 4 * 16 * 2048 * 128, 4 * 4 * 16 * 2048
# Stretches of a second: the energy counter moves every 0.1 s.
LONG = {"regime": "sustained", "also": ()}


def test_the_peak_is_of_the_call_without_d_out_and_what_earlier_calls_left(machine):
    record = measure(gpu_request(SDPA["flash"], CASE, "flash"), machine)
    assert record.status == "ok", record.reason
    forward, backward = (record.metrics[f"{name}/peak_memory_bytes"] for name in ("forward", "backward"))
    # q, k, v and the output, with the log-sum-exp and a few bytes of state.
    assert 4 * TENSOR + LSE <= forward < 4 * TENSOR + LSE + (2 << 20)
    # And three gradients, a row sum, FlashAttention's float32 sum of dq, and the contiguous output and gradient that
    # PyTorch makes for it (_scaled_dot_product_flash_attention_backward).
    assert 9 * TENSOR + 2 * LSE <= backward < 11 * TENSOR + 4 * LSE
    assert record.metrics["forward/outside_memory_bytes"] < 256 << 20


def test_clock_power_and_energy_are_those_of_the_timing(machine):
    # The energy of short calls is mostly that of flushes.
    case = replace(CASE, batch=16)
    record = measure(gpu_request(SDPA["flash"], case, "flash", **LONG), machine)
    for direction in ("forward", "backward"):
        window = record.passes[direction].window
        assert (window.source, window.lost) == ("nvml", False), window
        assert 0.3 * machine.environment["max_sm_clock_mhz"] < window.clock_mhz
        assert window.energy_from == "counter", window.note
        assert 0.2 < window.power_w / machine.environment["power_limit_w"] < 1.1
        assert 0.6 < window.call_share < 1.0
        joules = record.metrics[f"{direction}/joules_per_call"]
        assert joules == pytest.approx(window.power_w * record.metrics[f"{direction}/time_us"] / 1e6)


def test_twice_the_batch_takes_twice_the_joules(machine):
    def joules(batch):
        case = gpu_case(batch=batch, heads=16, q_len=2048, dim=128)
        return measure(gpu_request(SDPA["flash"], case, "flash", passes=("forward",), **LONG), machine).metrics[
            "forward/joules_per_call"
        ]

    assert joules(16) / joules(8) == pytest.approx(2.0, rel=0.12)
