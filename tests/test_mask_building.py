"""What a mask takes to build: beside the calls, and only where the mask is data."""

from dataclasses import replace

import fakes
import pytest
import torch
from test_measure import machine, measured, short_rounds  # noqa: F401 (fixtures)

from attn_exp.attention.inputs import make_inputs
from attn_exp.backends.flex import Flex
from attn_exp.backends.triton import Triton
from attn_exp.core.case.case import Case

CASE = Case(
    batch=1, q_heads=1, kv_heads=1, q_len=256, kv_len=256, head_dim=16, value_dim=16, dtype="float32", causal=True
)  # fmt: skip


class Masked(fakes.Honest):
    """Builds a mask, or fails to from the `fails`-th time on."""

    def __init__(self, name, fails=None, why="CUDA out of memory"):
        super().__init__(name)
        self.fails, self.why, self.built = fails, why, 0

    def build(self):
        self.built += 1
        if self.fails is not None and self.built >= self.fails:
            raise torch.OutOfMemoryError(self.why) if "memory" in self.why else RuntimeError(self.why)

    def prepare(self, case, inputs):
        return replace(super().prepare(case, inputs), build_mask=self.build)


@pytest.fixture
def record_of(machine, tmp_path):  # noqa: F811
    return lambda **options: measured(
        {"_target_": "test_mask_building.Masked", "name": "masked", **options}, machine, tmp_path
    )


def test_the_median_of_building_belongs_to_the_first_pass_alone(record_of):
    record = record_of()
    assert record.status == "ok", record.reason
    built_us = record.metrics["forward/mask_build_us"]
    assert built_us > 0
    assert record.metrics["forward/mask_build_of_call"] == pytest.approx(built_us / record.metrics["forward/time_us"])
    assert "forward/mask_build_bytes" not in record.metrics, "no allocator of a CPU counts"
    assert not any("mask" in name for name in record.metrics if name.startswith("backward"))


def test_a_mask_that_cannot_be_built_again_is_an_error(record_of):
    record = record_of(fails=1, why="the key lengths were freed")
    assert (record.status, record.reason) == ("error", "RuntimeError: the key lengths were freed")


def test_a_backend_without_such_a_mask_has_no_time_of_it(machine, tmp_path):  # noqa: F811
    record = measured({"_target_": "fakes.Honest", "name": "honest"}, machine, tmp_path)
    assert record.status == "ok"
    assert not any("mask" in name for name in record.metrics)


@pytest.mark.parametrize(
    ("backend", "changes", "is_data"),
    [
        (Flex, {"causal": False}, False),
        (Flex, {}, True),
        (Flex, {"window": 100}, True),
        (Triton, {}, False),
        (Triton, {"window": 100}, False),
        (Triton, {"prefix": 100}, True),
    ],
)
def test_masks_that_are_data_can_be_built_alone(backend, changes, is_data):
    pytest.importorskip("triton")
    case = replace(CASE, **changes)
    build = backend("b").prepare(case, make_inputs(case, "cpu", 0, with_gradients=False)).build_mask
    assert (build is not None) is is_data
    if is_data:
        assert build() is not None
