"""Dispatch on a GPU: the picked kernels run, eager, in training and under torch.compile."""

import re

import pytest
import torch
import torch.nn.functional as F

from attn_exp import dispatch
from attn_exp.backends.base import DeclarativeBackend
from attn_exp.backends.sdpa import Cudnn, Efficient, Flash, Math
from attn_exp.backends.triton import Triton
from attn_exp.core.case.case import Case
from attn_exp.core.dispatch_table import Bucket, DispatchTable, facts_of, write_table
from attn_exp.dispatch.load import _environment

pytestmark = pytest.mark.gpu

SDPA = F.scaled_dot_product_attention
CLASSES: dict[str, type[DeclarativeBackend]] = {
    "cudnn": Cudnn,
    "flash": Flash,
    "efficient": Efficient,
    "math": Math,
    "triton": Triton,
}
LENGTHS = {"cudnn": 256, "flash": 512, "efficient": 1024, "math": 128, "triton": 2048}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    configs = {name: {"_target_": f"{one.__module__}.{one.__name__}", "name": name} for name, one in CLASSES.items()}
    table = DispatchTable(
        made_by="attn-exp pick first",
        fingerprint=facts_of("cuda", _environment("cuda"), []),
        backends=configs,
        buckets=tuple(bucket(name, mode) for name in CLASSES for mode in ("inference", "training")),
    )
    path = tmp_path_factory.mktemp("dispatch") / "table.json"
    write_table(table, path)
    return path


def bucket(name, mode):
    length = LENGTHS[name]
    case = Case(
        batch=2, q_heads=4, kv_heads=4, q_len=length, kv_len=length, head_dim=64, value_dim=64, dtype="bfloat16",
        causal=True, align="top_left",
    )  # fmt: skip
    return Bucket(mode=mode, case=case, pick=name, times_us={name: 1.0})


def qkv(name, grad):
    make = torch.Generator("cuda").manual_seed(0)
    shape = (2, 4, LENGTHS[name], 64)
    return [
        torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)
    ]


def kernels(function):
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_picked_kernel_runs_and_computes_the_same(path, name, grad, compiled):
    torch._dynamo.reset()
    picks = dispatch.load(path)
    q, k, v = qkv(name, grad)

    def attend(*given):
        return F.scaled_dot_product_attention(*given, is_causal=True)

    function = torch.compile(attend, fullgraph=True) if compiled else attend
    order = torch._C._get_sdp_priority_order()

    def call():
        with picks:
            out = function(q, k, v)
        return (out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))) if grad else (out,)

    ran = kernels(call)
    for side in ("forward", "backward")[: 1 + grad]:
        # Inductor fuses the softmax of the unfused formula into a kernel of another name.
        if not (compiled and name == "math"):
            assert any(re.search(CLASSES[name].claims["cuda", side], kernel) for kernel in ran), ran
    expected = SDPA(q, k, v, is_causal=True)
    wanted = (expected, *torch.autograd.grad(expected.float().square().sum(), (q, k, v))) if grad else (expected,)
    for one, other in zip(call(), wanted, strict=True):
        assert (one - other).abs().max() <= 0.03 * other.abs().max()
    assert torch._C._get_sdp_priority_order() == order


def test_the_first_call_of_a_process_keeps_the_picks_order(path):
    # PyTorch sets its own order when it first chooses; loading has made it choose.
    picks = dispatch.load(path)
    q, k, v = qkv("flash", grad=False)
    assert any(re.search("flash_fwd", kernel) for kernel in kernels(lambda: picks.attention(q, k, v, is_causal=True)))
