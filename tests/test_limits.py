from dataclasses import replace

import pytest
from fakes import CASE, make_timing

from attn_exp.core.case.flops import flops
from attn_exp.core.record.limits import PRODUCT_FACTOR, above_product, below_kernels
from attn_exp.core.record.record import Work
from attn_exp.worker.machine.ceilings import fastest_product

PRODUCT = 1e12


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
        # The smallest ratios among the honest, calm and under a power cap (results/h200 at b6fbbac9).
        (0.990 * 541.5, 541.5, (), True),
        (11234.0, 12982.2, ("drift", "power_capped", "unstable"), True),
        (11234.0, 12982.2, ("launch_bound",), False),
        # Beside the kernels of five other processes (results/h200/tests/gpu_suite.txt).
        (107.1, 2556.9, ("shared_gpu",), True),
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


def test_calls_with_warm_caches_may_be_faster_than_a_traced_one_but_not_free():
    assert below_kernels("forward", timings(100.0, 268.0, "benchmark"), ()) is None
    assert "do not compute them again" in below_kernels("forward", timings(30.0, 268.0, "benchmark"), ())


def test_this_machine_has_a_fastest_product():
    assert fastest_product("cpu", "bfloat16", 1.0) > 1.0
