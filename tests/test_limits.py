from dataclasses import replace

import pytest
import torch
from fakes import CASE, make_timing

from attn_exp.core.case import E4M3
from attn_exp.core.flops import flops
from attn_exp.core.limits import PRODUCT_FACTOR, above_product, below_kernels
from attn_exp.core.record import Work
from attn_exp.worker.machine import ceilings
from attn_exp.worker.machine.ceilings import fastest_product

PRODUCT = 1e12
CASES = [CASE, replace(CASE, causal=False), replace(CASE, window=3), replace(CASE, q_len=1)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "case",
    [CASE, replace(CASE, causal=False), replace(CASE, window=3), replace(CASE, q_len=1)],
    ids=lambda c: c.label(),
)
def test_a_rate_above_one_and_a_half_products_is_told_with_both_figures(case, direction):
    # Of the unmasked pairs only: a mask that hides half of them allows half of the time.
    fastest_us = flops(case, direction) / (PRODUCT * PRODUCT_FACTOR) * 1e6
    assert above_product(case, direction, make_timing((fastest_us * 1.001,)), PRODUCT) is None
    assert above_product(case, direction, make_timing((fastest_us / 2,)), PRODUCT) == (
        f"{direction}: 3 TFLOP/s is above 1.5 times this machine's matrix product, measured at 1 TFLOP/s"
    )


def test_a_product_that_nobody_measured_and_a_call_that_is_only_issued_have_no_limit():
    instant = make_timing((1e-6,))
    assert above_product(CASE, "forward", instant, PRODUCT)
    assert above_product(CASE, "forward", instant, None) is None
    assert above_product(CASE, "forward", make_timing((1e-6,), timer="dispatch"), PRODUCT) is None


def test_a_block_is_compared_by_its_whole_work():
    work = Work(flops=4e6, attention_flops=1e6, bytes=1.0)
    assert above_product(CASE, "forward", make_timing((2.0,)), PRODUCT, work)
    assert above_product(CASE, "forward", make_timing((3.0,)), PRODUCT, work) is None


def timings(median_us, union_us, timer="device"):
    kernel = make_timing((union_us,), timer="kernel", notes={"union_us": union_us})
    return make_timing((median_us,), timer=timer), make_timing((1.0,), timer="event"), kernel


@pytest.mark.parametrize(
    ("median_us", "union_us", "flags", "honest"),
    [
        # Half of a batch on a side stream: 173 us of 268.
        (173.0, 268.0, (), False),
        (173.0, 268.0, ("power_capped",), False),
        # The smallest ratios among the honest, calm and under a power cap (results/h200).
        (0.990 * 541.5, 541.5, (), True),
        (11234.0, 12982.2, ("drift", "power_capped", "unstable"), True),
        (11234.0, 12982.2, ("launch_bound",), False),
        (35481.3, 40912.0, ("power_capped",), True),
        # Of a few microseconds, some are the timers' own.
        (9.4, 12.0, (), True),
        (5.0, 12.0, (), False),
        (300.0, 268.0, (), True),
    ],
)
def test_a_timer_of_the_stream_cannot_be_below_the_kernels_of_the_call(median_us, union_us, flags, honest):
    found = below_kernels("forward", timings(median_us, union_us), flags)
    assert (found is None) == honest
    if not honest:
        assert found == (
            f"forward: device has {median_us:,.1f} us where the call's kernels run for {union_us:,.1f} us: the stream "
            "that makes the call does not wait for all of its work"
        )


def test_only_timers_of_the_stream_are_compared_with_the_kernels():
    assert below_kernels("forward", timings(100.0, 268.0, "graph"), ())
    assert below_kernels("forward", timings(100.0, 268.0, "event"), ())
    for timer in ("dispatch", "kernel", "wall"):
        assert below_kernels("forward", timings(100.0, 268.0, timer), ()) is None
    assert below_kernels("forward", timings(100.0, 268.0)[:2], ()) is None, "nothing was traced"


@pytest.fixture
def products(monkeypatch):
    """Products whose times are looked up by (dtype, size, precision); what was multiplied is listed."""
    times_s, multiplied = {}, []
    monkeypatch.setattr(ceilings, "_product", lambda device, dtype, n: (dtype, n))

    def seconds(device, product):
        multiplied.append((*product, torch.get_float32_matmul_precision()))
        return times_s.get(multiplied[-1], times_s.get(product, 1e-3))

    monkeypatch.setattr(ceilings, "seconds", seconds)
    monkeypatch.setattr(ceilings, "_SEARCH_S", {"cpu": 0.01, "cuda": 0.01})
    return times_s, multiplied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", E4M3])
def test_the_fastest_product_of_a_cpu_may_be_float32s_and_a_short_one(products, dtype):
    times_s, multiplied = products
    times_s["float32", 256] = 1e-6
    assert fastest_product("cpu", dtype, float("inf")) == pytest.approx(2 * 256**3 / 1e-6)
    assert {(of, n) for of, n, _ in multiplied} == {(of, n) for of in (dtype, "float32") for n in (256, 512)}


def test_the_search_ends_when_a_product_is_fast_enough_and_drops_slow_ones(products):
    times_s, multiplied = products
    fastest_product("cpu", "float32", 1.0)
    assert len(multiplied) == 2, "one pass over both sizes"
    multiplied.clear()
    times_s["float16", 512] = 9.0
    fastest_product("cpu", "float16", float("inf"))
    assert [(of, n) for of, n, _ in multiplied].count(("float16", 512)) == 1


def test_a_gpu_may_compute_float32_in_tf32_and_is_left_as_it_was(products):
    times_s, multiplied = products
    times_s["float32", 8192, "high"] = 1e-4
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert fastest_product("cuda", "float32", float("inf")) == pytest.approx(2 * 8192**3 / 1e-4)
        assert torch.get_float32_matmul_precision() == "highest"
        multiplied.clear()
        fastest_product("cuda", "bfloat16", float("inf"))
        assert set(multiplied) == {("bfloat16", 8192, "highest")}
    finally:
        torch.set_float32_matmul_precision(before)


def test_this_machine_has_a_fastest_product():
    assert fastest_product("cpu", "bfloat16", 1.0) > 1.0
