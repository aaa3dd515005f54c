"""Transformer blocks around the attention: what they compute, what they cost, and that a wrong attention shows."""

from dataclasses import replace

import inprocess
import pytest
import torch
from fakes import Honest, make_request
from torch.utils.flop_counter import FlopCounterMode

from attn_exp.backends.base import load_backend
from attn_exp.backends.eager import Eager
from attn_exp.core.case.case import DTYPE_BYTES, Case
from attn_exp.core.case.flops import flops
from attn_exp.core.errors import UserError
from attn_exp.core.record.request import Compile
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure
from attn_exp.workloads import workload_of

SIZES = {"batch": 2, "q_heads": 4, "q_len": 24, "kv_len": 24, "head_dim": 16, "value_dim": 16, "dtype": "float32"}
DIT = Case(**SIZES, kv_heads=4, workload="dit_block", mlp_dim=96)
LAYER = Case(**SIZES, kv_heads=2, causal=True, workload="decoder_layer", mlp_dim=80)
DOUBLE = Case(**SIZES, kv_heads=4, workload="dit_double_block", mlp_dim=96)
CASES = pytest.mark.parametrize("case", [DIT, DOUBLE, LAYER], ids=["dit_block", "dit_double_block", "decoder_layer"])
CEILINGS = {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}
# Weights by layer: modulation, linear1, linear2; q and o, k and v, three of the MLP. Width 64.
MATRICES = {
    "dit_block": {"per_token": 64 * (192 + 96) + (64 + 96) * 64, "per_row": 64 * 192},
    "dit_double_block": {"per_token": 4 * 64 * 64 + 2 * 64 * 96, "per_row": 2 * 64 * 6 * 64},
    "decoder_layer": {"per_token": 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 80, "per_row": 0},
}


class Spoiled(Honest):
    """The formula with one mistake."""

    def __init__(self, name, mistake):
        super().__init__(name)
        self.mistake = mistake

    def prepare(self, case, inputs):
        right = super().prepare(case, inputs)

        def attention(q, k, v):
            if self.mistake == "scale":
                return right.attention(q * 1.1, k, v)
            if self.mistake == "keys":
                return right.attention(q, k.roll(1, dims=2), v)
            if self.mistake == "head":
                return right.attention(q, k, v).roll(1, dims=1)
            return right.attention(q, (k + k.detach()) / 2 if self.mistake == "gradient" else k, v)

        return type(right)(**{**right.__dict__, "attention": attention})


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr("attn_exp.timers.loop.BLOCK_US", 2_000.0)
    monkeypatch.setattr("attn_exp.timers.loop.WARM_UP_US", 1_000.0)
    return Machine("cpu", environment={"cpu": "fake"}, ceilings={dtype: dict(CEILINGS) for dtype in DTYPE_BYTES})


@CASES
def test_a_block_is_measured_as_attention_is(case, machine):
    record = measure(make_request("fakes.Honest", case), machine)
    assert (record.status, record.reason) == ("ok", None)
    assert set(record.passes["forward"].errors) == {"out"}
    weights = {
        "dit_block": {"d_linear1_weight", "d_query_norm_weight", "dvec"},
        "dit_double_block": {"d_text_proj_weight", "d_image_mlp_in_bias", "d_text_key_norm_weight", "dvec"},
        "decoder_layer": {"d_wq_weight", "d_mlp_norm_weight"},
    }
    assert set(record.passes["backward"].errors) >= {"dx"} | weights[case.workload]
    for direction, found in record.passes.items():
        work = workload_of(case).work(case)[direction]
        assert found.work == work
        at = record.metrics
        assert at[f"{direction}/flops"] == work.flops
        assert at[f"{direction}/tflops"] == pytest.approx(work.flops / at[f"{direction}/time_us"] / 1e6)
        assert at[f"{direction}/flops_of_measured"] == pytest.approx(at[f"{direction}/tflops"] * 1e12 / 1e11)
        assert f"{direction}/tflops_sdpa_convention" not in at
        names = {kernel.name for kernel in found.kernels}
        # The longest alone are kept, and which those are depends on what else the machine does.
        assert names & {"aten::bmm", "aten::matmul", "aten::addmm", "aten::mm", "aten::linear"}


@CASES
def test_flops_are_those_of_the_layers_and_of_what_the_mask_lets_through(case):
    work = workload_of(case).work(case)
    matrices = MATRICES[case.workload]
    linear = 2 * case.batch * (case.q_len * matrices["per_token"] + matrices["per_row"])
    assert work["forward"].attention_flops == flops(case, "forward")
    assert work["forward"].flops == linear + flops(case, "forward")
    assert work["backward"].flops == 2 * linear + flops(case, "backward")
    weights = sum(
        weight.nbytes for weight in workload_of(case).make_inputs(case, "cpu", 0, with_gradients=False).leaves
    )
    assert work["forward"].bytes == weights + 4 * case.batch * case.q_len * 64


def test_the_streams_of_a_double_block_have_weights_of_their_own_and_one_attention():
    inputs = workload_of(DOUBLE).make_inputs(DOUBLE, "cpu", 1, with_gradients=False)
    x, vec = inputs.operands
    seen = []

    def attention(q, k, v):
        seen.append(q.shape)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    before = inputs.block(attention, x, vec)
    # 24 tokens: 2 of text.
    assert seen == [(2, 4, 24, 16)] and before.shape == x.shape
    with torch.no_grad():
        inputs.block.text.mlp_out.bias += 1.0
    after = inputs.block(attention, x, vec)
    changed = (after != before).any(dim=-1)
    assert changed[:, :2].all() and not changed[:, 2:].any()
    with torch.no_grad():
        inputs.block.text.qkv_linear.weight *= -1.0
    assert (inputs.block(attention, x, vec) != after).any(dim=-1).all(), "image attends to text"


def test_the_counter_agrees_where_nothing_is_masked():
    inputs = workload_of(DIT).make_inputs(DIT, "cpu", 1, with_gradients=False)
    calls = workload_of(DIT).calls(Eager("eager"), DIT, inputs)
    with FlopCounterMode(display=False) as counter:
        calls.forward()
    assert counter.get_total_flops() == workload_of(DIT).work(DIT)["forward"].flops


@pytest.mark.parametrize("mistake", ["none", "scale", "keys", "head", "gradient"])
@CASES
def test_a_wrong_attention_shows_in_the_block(case, mistake, machine):
    backend = {"_target_": "test_workloads.Spoiled", "name": "spoiled", "mistake": mistake}
    record = measure(make_request(backend, case), machine)
    assert record.status == ("ok" if mistake == "none" else "inaccurate"), record.reason
    if mistake not in ("none", "gradient"):
        assert measure(make_request(backend, case, passes=("forward",)), machine).status == "inaccurate"


@pytest.mark.parametrize("backend", ["attn_exp.backends.reference.Reference", "attn_exp.backends.compiled.Compiled"])
def test_a_backend_that_is_no_function_cannot_stand_in_a_block(backend, machine):
    record = measure(make_request({"_target_": backend, "name": "one"}, LAYER), machine)
    assert record.status == "unsupported"
    assert record.reason.startswith("one: a block needs a function of q, k and v")
    # Told by attn-exp backends as well, which prepares nothing.
    assert load_backend({"_target_": backend, "name": "one"}).unsupported(LAYER, "cpu") == record.reason
    assert "\n" not in record.reason


def test_the_whole_block_is_compiled_as_one_graph(machine, monkeypatch):
    # Without the seconds of a C++ compiler: what Dynamo hands to Inductor, which test_compilation.py has.
    called, real = [], torch.compile

    def backend(graph, _):
        called.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda model, options=None, **rest: real(model, backend=backend, **rest))
    request = make_request("fakes.Honest", LAYER, passes=("forward",))
    record = measure(replace(request, compile=Compile(mode="default", fullgraph=True)), machine)
    assert (record.status, record.reason) == ("ok", None)
    assert (record.compiled.graphs, record.compiled.breaks, record.compiled.recompilations) == (1, {}, 0)
    # Attention alone would leave the projections as they are.
    assert 7 in [targets.count(torch._C._nn.linear) for targets in called]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "dit_blok"}, "workload=dit_blok does not exist: did you mean 'dit_block'"),
        ({"causal": True}, "workload=dit_block has no causal mask: set causal=false, or choose model=flux"),
        ({"kv_heads": 2}, "has as many key-value heads as query heads"),
        ({"head_dim": 15, "value_dim": 15}, "set an even model.head_dim"),
        ({"layout": "bshd"}, "leave layout out"),
        ({"workload": "dit_double_block", "q_len": 1, "kv_len": 1}, "has tokens of text and of an image"),
        ({"mlp_dim": None}, "needs its MLP's width: set mlp_dim=14336"),
    ],
)
def test_a_case_that_the_block_does_not_have_is_one_sentence(changes, message):
    with pytest.raises(UserError, match=r"workload=|mlp_dim=") as refused:
        replace(DIT, **changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_blocks_of_several_models_make_one_sweep(tmp_path, monkeypatch):
    typed = inprocess.typed(monkeypatch, tmp_path)
    code, out, _ = typed("-m", "model=flux,llama3_8b", "workload=attention,dit_block", "device=cpu", "dry_run=true")
    assert code == 0
    assert out.count("would run") == 4 and out.count("impossible ") == 1
