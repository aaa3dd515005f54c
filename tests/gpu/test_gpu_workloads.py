"""Transformer blocks on a GPU: FLUX's and llama's sizes, by the backends that can be called inside of one."""

from dataclasses import replace

import pytest
from fakes import make_request
from test_gpu import SDPA

from attn_exp.core.case.case import Case
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.record.request import Compile
from attn_exp.worker.measure import measure

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

DIT = Case(
    batch=1, q_heads=24, kv_heads=24, q_len=4608, kv_len=4608, head_dim=128, value_dim=128, dtype="bfloat16",
    workload="dit_block", mlp_dim=12288,
)  # fmt: skip
LAYER = Case(
    batch=1, q_heads=32, kv_heads=8, q_len=4096, kv_len=4096, head_dim=128, value_dim=128, dtype="bfloat16",
    causal=True, workload="decoder_layer", mlp_dim=14336,
)  # fmt: skip
BACKENDS = SDPA | {
    "flex": "attn_exp.backends.flex.Flex",
    "triton": "attn_exp.backends.triton.Triton",
    "fa4": "attn_exp.backends.fa4.FlashAttention4",
    "cudnn_graph": "attn_exp.backends.cudnn_graph.CudnnGraph",
}


def measured(machine, case, name, mode="none"):
    options = {"timer": "device", "also": ("kernel",), "budget_s": 0.2}
    request = make_request({"_target_": BACKENDS[name], "name": name}, case, **options)
    return measure(replace(request, device="cuda", compile=Compile(mode=mode)), machine)


@pytest.mark.parametrize("name", ["flash", "cudnn", "auto", "flex", "triton", "fa4"])
@pytest.mark.parametrize("case", [DIT, LAYER], ids=["dit_block", "decoder_layer"])
def test_a_block_is_right_and_its_rate_is_possible(machine, case, name):
    record = measured(machine, case, name)
    if record.status in ("unavailable", "unsupported"):
        pytest.skip(record.reason)
    assert (record.status, record.reason) == ("ok", None)
    peak = datasheet_peak(machine.environment["gpu"])
    for direction, found in record.passes.items():
        rate = record.metrics[f"{direction}/tflops"] * 1e12
        # Matrix products are most of a block, and run near what a large one reaches.
        assert 0.2 * record.ceilings["matmul_flops_per_s"] < rate < peak.flops["bfloat16"]
        assert found.work.attention_flops < found.work.flops
        assert len(found.kernels) > 5


@pytest.mark.parametrize("case", [DIT, LAYER], ids=["dit_block", "decoder_layer"])
def test_a_compiled_block_is_one_graph_and_no_slower(machine, case):
    plain, compiled = measured(machine, case, "cudnn"), measured(machine, case, "cudnn", "default")
    assert (compiled.status, compiled.reason) == ("ok", None)
    assert compiled.compiled.graphs == 1 and not compiled.compiled.breaks
    assert compiled.metrics["forward/time_us"] < plain.metrics["forward/time_us"]
