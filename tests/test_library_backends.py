"""Backends of other libraries, on stand-ins that compute what the libraries document (tests/standins.py)."""

import importlib.util
import re
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
import yaml
from standins import install, install_fa2, install_fa3, install_fa4, install_te, install_varlen, install_xformers
from test_conf import CONF

from attn_exp.attention.inputs import make_inputs
from attn_exp.attention.reference import reference, sink_gradients
from attn_exp.backends.base import load_backend
from attn_exp.backends.bshd import sequence_starts
from attn_exp.backends.fa2 import FlashAttention2
from attn_exp.backends.fa3 import FlashAttention3
from attn_exp.backends.fa4 import FlashAttention4
from attn_exp.backends.flashinfer import FlashInfer
from attn_exp.backends.flashmla import FlashMla
from attn_exp.backends.helion import Helion
from attn_exp.backends.package import Refused, Unavailable
from attn_exp.backends.sage import Sage
from attn_exp.backends.te import TransformerEngine
from attn_exp.backends.varlen import Varlen
from attn_exp.backends.xformers import XformersCutlass, XformersFlash3
from attn_exp.core.case.case import Case

CASE = Case(
    batch=2, q_heads=4, kv_heads=2, q_len=12, kv_len=12, head_dim=16, value_dim=16, dtype="float32"
)  # fmt: skip
LENGTHS = (5, 1, 6)
BACKENDS = {
    FlashAttention2: install_fa2,
    FlashAttention3: install_fa3,
    FlashAttention4: install_fa4,
    XformersCutlass: install_xformers,
    XformersFlash3: install_xformers,
    TransformerEngine: install_te,
    Varlen: install_varlen,
}
# Passed with torch.compile, which they are custom operators for.
OPERATORS = (FlashAttention3, XformersFlash3)


def change(**changes):
    return replace(CASE, **changes)


CASES = [
    CASE,
    change(layout="bshd"),
    change(causal=True),
    change(causal=True, q_len=5),
    change(causal=True, q_len=5, align="top_left"),
    change(causal=True, q_len=1),
    change(q_len=7),
    change(causal=True, window=1),
    change(causal=True, window=4),
    change(causal=True, window=4, q_len=9),
    change(causal=True, window=40),
    change(kv_heads=4),
    change(kv_heads=4, causal=True),
    change(kv_heads=4, causal=True, q_len=5),
    change(kv_heads=4, causal=True, q_len=5, align="top_left"),
    change(kv_heads=4, causal=True, window=4),
    change(kv_heads=4, causal=True, window=4, q_len=9),
    change(kv_heads=4, head_dim=24, value_dim=8),
    change(kv_heads=4, causal=True, q_len=1, window=20),
    change(softcap=0.7),
    change(softcap=0.7, causal=True, window=5),
    change(batch=1, lengths=LENGTHS),
    change(batch=1, lengths=LENGTHS, causal=True),
    change(batch=1, lengths=LENGTHS, causal=True, window=3, softcap=2.0),
    change(sink=True),
    change(sink=True, causal=True, window=4, softcap=0.7),
    change(sink=True, batch=1, lengths=LENGTHS, causal=True),
    change(batch=1, lengths=(0, 5, 0, 7, 0), causal=True),
    change(batch=1, kv_heads=4, lengths=LENGTHS),
    change(batch=1, kv_heads=4, lengths=LENGTHS, causal=True),
    change(batch=1, kv_heads=4, lengths=LENGTHS, causal=True, window=3, layout="bshd"),
]


def refused(backend, case):
    """By what it declares, but for dtype and head dimensions, which stand-ins take as they come."""
    declared = replace(
        backend.supports, devices=("cpu",), dtypes=("float32",), head_dims=None, head_dim_multiple=1, value_dims="any"
    )
    return declared.refusal(case, "cpu")


def computed(backend, case, seed=3):
    inputs = make_inputs(case, "cpu", seed, with_gradients=True)
    calls = backend.prepare(case, inputs)
    with calls.scope():
        out = calls.forward()
        gradients = calls.backward(out)()
    return inputs, calls, dict(zip(("out", *inputs.gradient_names), (out.detach(), *gradients), strict=True))


def assert_right(case, inputs, found):
    if case.sink:
        right, _ = sink_gradients(case, inputs, torch.arange(case.kv_heads))
        torch.testing.assert_close(found["d_sink"], right, rtol=1e-4, atol=1e-5)
    for name, tensor in reference(case, inputs, with_gradients=True).items():
        assert found[name].shape == tensor.shape, name
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda told, name=name: f"{name} {told}"
        )


TAKEN = [(kind, case) for kind in BACKENDS for case in CASES if not refused(kind("it"), case)]


@pytest.mark.parametrize(
    ("kind", "case"), TAKEN, ids=lambda one: one.label() if isinstance(one, Case) else one.__name__
)
def test_a_case_is_translated_as_it_is_meant(kind, case, monkeypatch):
    BACKENDS[kind](monkeypatch)
    inputs, _, found = computed(kind("it"), case)
    assert_right(case, inputs, found)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (FlashAttention2, {"causal": True, "q_len": 5, "align": "top_left"}, "set align=bottom_right"),
        (FlashAttention2, {"value_dim": 8}, "needs equal head dimensions, not 16 and 8"),
        (FlashAttention2, {"head_dim": 264, "value_dim": 264}, "up to 256, not 264"),
        (FlashAttention3, {"head_dim": 192, "value_dim": 64}, "only of 192 and 128, 64 and 128, 64 and 256"),
        (FlashAttention4, {"head_dim": 72, "value_dim": 72}, "has head dimensions 64 or 96 or 128 or 256, not 72"),
        (FlashAttention4, {"head_dim": 128, "value_dim": 64}, "only of 192 and 128, 256 and 128"),
        (XformersCutlass, {"kv_heads": 4, "causal": True, "window": 4}, "set window=null"),
        (XformersCutlass, {}, "set model.kv_heads=null"),
        (XformersFlash3, {"kv_heads": 4}, "has head dimensions 64 or 96"),
        (TransformerEngine, {"head_dim": 12, "value_dim": 12}, "multiples of 8, not 12"),
        (Helion, {"q_len": 1}, "at least 2 queries and 2 keys, not 1 and 12"),
        (Helion, {"head_dim": 24, "value_dim": 24}, "multiples of 16, not 24"),
    ],
)
def test_a_refusal_says_what_to_set_instead(kind, changes, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    reason = kind("it").unsupported(change(dtype="bfloat16", **changes), "cuda")
    assert reason is not None
    assert says in reason


def test_flash_attention_4_pairs_fewer_dimensions_on_blackwell(monkeypatch):
    def reason(capability, **changes):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return FlashAttention4("fa4").unsupported(change(dtype="bfloat16", **changes), "cuda")

    assert "no sinks with head dimensions of 256 on Blackwell" in reason(
        (10, 0), sink=True, head_dim=256, value_dim=256
    )
    pair = {"head_dim": 256, "value_dim": 128, "kv_heads": 4}
    assert reason((9, 0), **pair) is None
    assert "on Blackwell" in reason((10, 0), **pair)
    assert reason((10, 0), head_dim=192, value_dim=128) is None
    assert reason((9, 0), head_dim=192, value_dim=128) is None


def test_flash_attention_4_on_hopper_has_no_backward_of_grouped_heads_of_unlike_dimensions(monkeypatch):
    BACKENDS[FlashAttention4](monkeypatch)
    case = change(head_dim=24, value_dim=8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for with_gradients in (False, True):
        inputs = make_inputs(case, "cpu", 3, with_gradients=with_gradients)
        refusal = pytest.raises(Refused, match=r"set passes=\[forward\]") if with_gradients else nullcontext()
        with refusal:
            FlashAttention4("fa4").prepare(case, inputs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    FlashAttention4("fa4").prepare(case, make_inputs(case, "cpu", 3, with_gradients=True))


def test_the_deterministic_backward_is_asked_for_and_refused_where_there_is_none(monkeypatch):
    asked = install_fa3(monkeypatch)
    for deterministic in (True, False):
        computed(FlashAttention3("fa3", deterministic=deterministic), CASE)
    assert [backward["deterministic"] for backward in asked] == [True, False]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    largest = change(head_dim=256, value_dim=256, dtype="bfloat16")
    assert FlashAttention3("fa3").unsupported(largest, "cuda") is None
    assert "set deterministic=false" in FlashAttention3("fa3", deterministic=True).unsupported(largest, "cuda")


@pytest.mark.parametrize(
    ("left_out", "asked", "says"),
    [
        ("HDIM256", {"head_dim": 256, "value_dim": 256}, "built without head dimensions above 192"),
        ("HDIMDIFF192", {"head_dim": 192, "value_dim": 128}, "built without different head dimensions"),
        ("SOFTCAP", {"softcap": 5.0}, "built without softcap"),
        ("LOCAL", {"causal": True, "window": 4}, "built without sliding windows"),
        ("VARLEN", {"batch": 1, "lengths": LENGTHS}, "built without packed sequences"),
        ("FP16", {"dtype": "float16"}, "built without float16"),
    ],
)
def test_a_feature_missing_from_the_build_of_flash_attention_3_is_unsupported(left_out, asked, says, monkeypatch):
    # It would end in a segmentation fault.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    case = change(**{"dtype": "bfloat16", "head_dim": 64, "value_dim": 64, "kv_heads": 4} | asked)
    for kind in (FlashAttention3, XformersFlash3):
        without_flags = kind("it").unsupported(case, "cuda")
        flags = {f"FLASHATTENTION_DISABLE_{name}": name == left_out for name in ("HDIM64", "HDIM128", left_out)}
        with monkeypatch.context() as patched:
            install(patched, "flash_attn_config").CONFIG = {"build_flags": flags}
            found = kind("it").unsupported(case, "cuda")
        assert found == without_flags if says is None or without_flags else says in found


@pytest.mark.parametrize(
    ("name", "module", "says"),
    [
        ("fa2", "flash_attn.flash_attn_interface", 'flash-attn is not installed: pip install "flash-attn>=2.8,<3"'),
        ("fa3", "flash_attn_interface", "flash_attn_3 is not installed: git clone --recursive https://github.com/Dao"),
        ("helion", "helion", 'helion is not installed: pip install "helion>=1.0'),
    ],
)
def test_a_missing_package_is_named_with_what_brings_it(name, module, says, monkeypatch):
    for depth in range(module.count(".") + 1):
        monkeypatch.setitem(sys.modules, module.rsplit(".", depth)[0], None)
    backend = load_backend(yaml.safe_load((CONF / f"backend/{name}.yaml").read_text()))
    with pytest.raises(Unavailable) as raised:
        backend.prepare(CASE, make_inputs(CASE, "cpu", 0, with_gradients=True))
    assert str(raised.value).startswith(says)


def test_flash_attention_2_is_missing_where_only_flash_attention_4_is(monkeypatch):
    # flash-attn-4 leaves a folder flash_attn without an __init__.py.
    install(monkeypatch, "flash_attn.cute")
    with pytest.raises(Unavailable, match="flash-attn is not installed"):
        FlashAttention2("fa2").prepare(CASE, make_inputs(CASE, "cpu", 0, with_gradients=True))


@pytest.mark.parametrize(
    ("kind", "state", "says"),
    [
        (
            XformersCutlass,
            {
                "failed": OSError(
                    "xFormers can't load C++/CUDA extensions. It\nwas built for another.\n  Please reinstall"
                )
            },
            "xFormers can't load C++/CUDA extensions. It was built for another.",
        ),
        (XformersFlash3, {"built": ("cutlass",)}, "has no flash3 here: it needs flash_attn_3"),
        (XformersCutlass, {"built": ()}, "has no cutlass here"),
    ],
)
def test_an_xformers_that_does_not_fit_is_unavailable(kind, state, says, monkeypatch):
    install_xformers(monkeypatch, **state)
    with pytest.raises(Unavailable) as raised:
        kind("it").prepare(CASE, make_inputs(CASE, "cpu", 0, with_gradients=True))
    assert says in str(raised.value)
    assert "reinstall" not in str(raised.value)


OPERATOR_CASES = [
    change(kv_heads=4),
    change(kv_heads=4, causal=True, window=4, q_len=9),
    change(batch=1, kv_heads=4, lengths=LENGTHS, causal=True),
]


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=Case.label)
@pytest.mark.parametrize("kind", OPERATORS)
def test_an_operator_is_what_torch_library_wants_it_to_be(kind, case, monkeypatch):
    BACKENDS[kind](monkeypatch)
    name = "fa3_attention" if kind is FlashAttention3 else "xformers_fa3_attention"
    inputs = make_inputs(case, "cpu", 1, with_gradients=True).laid_out("bshd")
    tensors = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in inputs.qkv]
    starts = sequence_starts(case, torch.device("cpu"))
    masks = (starts, list(case.lengths or ()), case.causal, case.window, None, False)
    forward = getattr(torch.ops.attn_exp, name).default
    checked = torch.library.opcheck(forward, (*tensors, *masks))
    assert set(checked.values()) == {"SUCCESS"}
    out, lse = forward(*tensors, *masks)
    d_out = inputs.d_out_bhsd.transpose(1, 2)
    backward = getattr(torch.ops.attn_exp, f"{name}_backward").default
    saved = [tensor.detach() for tensor in (d_out, *tensors, out, lse)]
    checked = torch.library.opcheck(backward, (*saved, *masks))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=Case.label)
@pytest.mark.parametrize("kind", OPERATORS)
def test_compiled_whole_it_is_one_graph_and_right(kind, case, monkeypatch):
    BACKENDS[kind](monkeypatch)
    torch.compiler.reset()
    inputs, calls, _ = computed(kind("it"), case)
    inputs = inputs.laid_out("bshd")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(calls.attention, fullgraph=True, backend=counter)
    for _ in range(2):
        out = compiled(*inputs.qkv)
        gradients = torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
        assert_right(case, inputs, dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True)))
    assert counter.frame_count == 1
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("_attention" in name for name in names) == 1
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("kind", "direction", "ran", "claimed"),
    [
        (FlashAttention2, "forward", "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128", True),
        (FlashAttention2, "forward", "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd", False),
        (FlashAttention3, "forward", "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<", True),
        (FlashAttention3, "backward", "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<", False),
        (
            FlashAttention4,
            "backward",
            "kernel_cutlass_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_obj",
            True,
        ),
        (FlashAttention4, "backward", "kernel_cutlass_flash_bwd_preprocessFlashAttentionBackwardPreprocess_obj", False),
        (XformersCutlass, "forward", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention", True),
        (TransformerEngine, "forward", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", True),
        (TransformerEngine, "forward", "void at::native::softmax_warp_forward<c10::BFloat16", False),
        (FlashInfer, "forward", "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTr", True),
        (FlashInfer, "forward", "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, ", False),
        (
            FlashMla,
            "forward",
            "void sm90::decode::dense::flash_fwd_splitkv_mla_kernel<Traits<cutlass::bfloat16_t>",
            True,
        ),
        (
            FlashMla,
            "forward",
            "void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512, 8, 32>",
            False,
        ),
        (Sage, "forward", "_attn_fwd", True),
        (Sage, "forward", "quant_per_block_int8_kernel", False),
        (Helion, "forward", "_helion_attention_forward", True),
    ],
)
def test_claims_match_the_kernels_of_the_pass_alone(kind, direction, ran, claimed):
    assert bool(re.search(kind("it").claimed_kernels(direction, "cuda"), ran)) is claimed
    assert kind("it").claimed_kernels(direction, "cpu") is None


def test_an_unknown_way_to_autotune_helion_is_a_mistake_of_the_users():
    with pytest.raises(Unavailable, match="autotune='much' is not one of none, quick, full"):
        load_backend({"_target_": "attn_exp.backends.helion.Helion", "name": "helion", "autotune": "much"})


HELION_CASES = [
    change(dtype="float16"),
    change(dtype="float16", causal=True, q_len=7, layout="bshd"),
    change(dtype="float16", causal=True, q_len=15, kv_len=9, align="top_left", window=8),
    change(dtype="float16", causal=True, window=3, softcap=2.0, kv_heads=1),
    change(dtype="float16", value_dim=32),
]


@pytest.mark.parametrize("case", HELION_CASES, ids=Case.label)
def test_the_helion_kernels_are_right_in_helions_reference_mode(case, monkeypatch):
    if importlib.util.find_spec("helion") is None:
        pytest.skip("helion is not installed")
    from attn_exp.attention.expected import expected
    from attn_exp.kernels import helion_attention

    monkeypatch.setenv("HELION_INTERPRET", "1")
    for tiles in ("_FORWARD_TILES", "_DK_DV_TILES", "_DQ_TILES"):
        monkeypatch.setattr(helion_attention, tiles, {256: (4, 4, 4, 1)})
    multiply = torch.mm
    # The mode runs tiles one after another in PyTorch, which has no product with another output type on a CPU.
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None: multiply(a.to(out_dtype), b.to(out_dtype)))
    inputs, _, found = computed(Helion("helion"), case)
    right = expected(case, inputs, with_gradients=True)
    for name, tensor in found.items():
        error = right.judge(name, tensor)
        assert error.relative <= error.tolerance, name
        assert error.worst_row <= error.row_tolerance, name


def test_flex_claims_the_kernels_of_the_backend_that_it_was_told():
    def claims(*directions, **options):
        backend = load_backend({"_target_": "attn_exp.backends.flex.Flex", "name": "flex", **options})
        return [backend.claimed_kernels(direction, "cuda") for direction in directions]

    both = ("forward", "backward")
    template, flash = "triton_tem_fused_flex_attention_0", "kernel_cutlass_FlashAttentionForwardSm90_object"
    for options, right, wrong in (({}, template, flash), ({"kernel_options": {"BACKEND": "FLASH"}}, flash, template)):
        forward, _ = claims(*both, **options)
        assert re.search(forward, right) and not re.search(forward, wrong)
    assert claims(*both, kernel_options={"BACKEND": "FLASH"}) == [
        FlashAttention4.claims["cuda", direction] for direction in both
    ]
