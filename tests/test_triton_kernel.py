"""The Triton kernels against the float32 reference, on a CPU in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so everything runs in one child process that has it set.
"""

import math
import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.attention.reference import reference, sink_gradients
from attn_exp.core.case.case import Case

pytest.importorskip("triton")

NAMES = ("out", "dq", "dk", "dv")
# The interpreter cuts bfloat16 off instead of rounding it: twice the error that a GPU makes.
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def case(**sizes: Any) -> Case:
    base = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 40, "kv_len": 40, "head_dim": 16, "dtype": "float32"}
    given = base | sizes
    return Case(**({"value_dim": given["head_dim"]} | given))


CASES = {
    "lengths that no block divides": case(q_len=37, kv_len=53),
    "causal bottom-right, rows without keys": case(causal=True, q_len=70, kv_len=37),
    "causal top-left, longer keys": case(causal=True, align="top_left", q_len=37, kv_len=90),
    "causal top-left, keys that no query sees": case(causal=True, align="top_left", q_len=20, kv_len=120),
    "window": case(causal=True, window=20, q_len=70, kv_len=70),
    "window top-left, rows without keys": case(causal=True, window=9, align="top_left", q_len=120, kv_len=37),
    "prefix bottom-right, longer queries": case(causal=True, prefix=7, q_len=90, kv_len=37),
    "chunks, longer keys": case(causal=True, chunk=40, q_len=50, kv_len=97),
    "blocks bottom-right, rows without keys": case(causal=True, block=7, q_len=90, kv_len=37),
    "packed empty": case(causal=True, q_len=53, kv_len=53, lengths=(0, 13, 0, 40, 0)),
    "packed causal window": case(causal=True, window=9, q_len=80, kv_len=80, lengths=(13, 1, 40, 26)),
    "requests": case(q_len=22, kv_len=97, lengths=(1, 20, 1), kv_lengths=(40, 20, 37), causal=True, q_heads=4),
    "one key-value head": case(q_heads=4, kv_heads=1, q_len=33, kv_len=50),
    "one query and one key": case(q_len=1, kv_len=1, causal=True),
    "head_dim 256": case(head_dim=256, q_len=20, kv_len=20, causal=True),
    "value_dim of DeepSeek": case(head_dim=192, value_dim=128, q_len=20, kv_len=20, causal=True),
    "head_dim no power of two": case(head_dim=40, value_dim=24, q_len=33),
    "sinks causal grouped": case(sink=True, q_heads=4, kv_heads=2, causal=True, softcap=3.0),
    "sinks and a window, rows without keys": case(sink=True, causal=True, window=9, q_len=90, kv_len=37),
    "alibi causal grouped": case(alibi=True, q_heads=6, kv_heads=2, causal=True),
    "bias": case(bias="heads", batch=2, q_heads=4, kv_heads=2, q_len=37, kv_len=20),
    "shared bias, rows without keys": case(bias="shared", q_heads=2, causal=True, window=9, q_len=90, kv_len=37),
    "all scores": case(bias="heads", alibi=True, sink=True, softcap=3.0, q_heads=4, kv_heads=2, causal=True),
    "softcap and a window": case(softcap=50.0, q_heads=4, kv_heads=2, causal=True, window=20),
    "float16 grouped window": case(dtype="float16", q_heads=4, kv_heads=2, causal=True, window=30, q_len=50, kv_len=50),
    "bfloat16": case(dtype="bfloat16", head_dim=64, causal=True),
}


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kv_heads, causal = draw.choice((1, 2)), draw.random() < 0.7
    return case(
        batch=draw.choice((1, 2)),
        q_heads=kv_heads * draw.choice((1, 2, 3)),
        kv_heads=kv_heads,
        # A block has 32 queries and 16 keys, and the interpreter takes its time for each.
        q_len=draw.randint(1, 50),
        kv_len=draw.randint(1, 50),
        head_dim=draw.choice((16, 24, 32)),
        value_dim=draw.choice((16, 24, 32)),
        causal=causal,
        align=draw.choice(("bottom_right", "top_left")),
        **{
            draw.choice(("window", "prefix", "chunk", "block")): draw.randint(1, 40)
            if causal and draw.random() < 0.7
            else None
        },
    )


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


@pytest.mark.parametrize("name", CASES)
def test_close_to_the_reference(child: ProcessPoolExecutor, name: str) -> None:
    _assert_close(child.submit(_errors, CASES[name]).result(), CASES[name])


@pytest.mark.parametrize("seed", range(3))
def test_random_cases_are_close_to_the_reference(child: ProcessPoolExecutor, seed: int) -> None:
    drawn = random_case(seed)
    _assert_close(child.submit(_errors, drawn).result(), drawn)


@pytest.mark.parametrize("how", ["bshd", "strided", "overlap", "descriptors"])
def test_layouts_and_options_of_the_kernels(child: ProcessPoolExecutor, how: str) -> None:
    several = [
        case(dtype="float16", q_heads=2, kv_heads=1, causal=True, window=30, q_len=40, kv_len=60, head_dim=32),
        # More queries without keys than a block has.
        case(dtype="float16", q_len=50, kv_len=17, causal=True),
    ]
    for each in several:
        _assert_close(child.submit(_errors, each, how).result(), each)


@pytest.mark.parametrize(
    "sizes", [{}, {"q_len": 9, "causal": True}, {"dtype": "float16", "layout": "bshd", "head_dim": 72, "value_dim": 64}]
)
def test_values_that_are_channels_of_keys(child: ProcessPoolExecutor, sizes: dict[str, Any]) -> None:
    latent = case(latent=True, **{"q_heads": 8, "kv_heads": 1, "q_len": 1, "head_dim": 40, "value_dim": 32} | sizes)
    _assert_close(child.submit(_latent_errors, latent).result(), latent)


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ("", {"batch": 3, "q_len": 1, "kv_len": 70, "page_size": 16}),
        (
            "overlap",
            {"batch": 2, "q_len": 9, "kv_len": 53, "page_size": 5, "dtype": "float16", "layout": "bshd", "window": 20},
        ),
        (
            "",
            {
                "q_len": 22,
                "kv_len": 97,
                "lengths": (1, 20, 1),
                "kv_lengths": (40, 20, 37),
                "page_size": 7,
                "sink": True,
            },
        ),
        ("", {"batch": 2, "q_len": 1, "kv_len": 40, "page_size": 1, "latent": True, "value_dim": 32, "kv_heads": 1}),
        ("overlap", {"batch": 2, "q_len": 40, "kv_len": 40, "page_size": 64, "alibi": True, "softcap": 5.0}),
        ("", {"batch": 2, "kv_len": 50, "page_size": 4, "pages": "shared", "dtype": "float16", "cache_dtype": "fp8"}),
    ],
)
def test_keys_in_pages(child: ProcessPoolExecutor, sizes: dict[str, Any], how: str) -> None:
    in_pages = case(**{"q_heads": 4, "kv_heads": 2, "q_len": 3, "head_dim": 40, "causal": True} | sizes)
    _assert_close(child.submit(_paged_errors, in_pages, how).result(), in_pages)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2, "q_len": 1},
        {"q_len": 3, "causal": True, "kv_len": 700, "kv_heads": 1, "value_dim": 24},
        {"q_len": 4, "batch": 2, "page_size": 7, "causal": True, "pages": "shared", "cache_dtype": "fp8"},
        {"q_len": 1, "kv_len": 257, "page_size": 1, "latent": True, "value_dim": 32, "kv_heads": 1},
    ],
)
def test_keys_that_are_split_over_programs(child: ProcessPoolExecutor, sizes: dict[str, Any]) -> None:
    few = case(**{"q_heads": 4, "kv_heads": 2, "kv_len": 600, "head_dim": 40} | sizes)
    _assert_close(child.submit(_decoded_errors, few).result(), few)


def test_the_same_inputs_give_the_same_bits(child: ProcessPoolExecutor) -> None:
    assert child.submit(_repeats_bitwise).result()


def test_gradient_of_a_sum_has_no_strides(child: ProcessPoolExecutor) -> None:
    assert child.submit(_expanded_gradient).result() < TOLERANCES["float32"]


def test_opcheck(child: ProcessPoolExecutor) -> None:
    assert set(child.submit(_opcheck).result().values()) == {"SUCCESS"}


def test_compiles_into_one_graph(child: ProcessPoolExecutor) -> None:
    frames, graphs, equal = child.submit(_compiled).result()
    assert (frames, graphs, equal) == (1, 1, True)


def _assert_close(errors: dict[str, float], checked: Case) -> None:
    for name, error in errors.items():
        assert error <= TOLERANCES[checked.dtype], f"{name} of {checked.label()} is off by {error:.2g}"


def _start() -> None:
    import triton_interpreter

    triton_interpreter.repair()
    torch.set_num_threads(1)


def _laid_out(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers in (batch, length, heads, dim) memory, or every second row of a wider tensor."""
    if how == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    batch, heads, length, dim = tensor.shape
    wide = torch.full((batch, heads, 2 * length, dim + 8), float("nan"), dtype=tensor.dtype)
    wide[:, :, ::2, :dim] = tensor
    return wide[:, :, ::2, :dim]


def _run(checked: Case, inputs: Inputs, how: str = "") -> dict[str, torch.Tensor]:
    from attn_exp.backends.triton import biases_of, mask_of
    from attn_exp.kernels import launch, tuning
    from attn_exp.kernels.triton_attention import attention

    tensors = [*inputs.qkv, inputs.d_out_bhsd]
    if how in ("bshd", "strided"):
        tensors = [_laid_out(tensor.detach(), how) for tensor in tensors]
    q, k, v, d_out = (tensor.detach() for tensor in tensors)
    leaves = [q, k, v]
    options = {"softcap": checked.softcap, "added": biases_of(checked, q.device)}
    if inputs.sink is not None:
        leaves.append(inputs.sink.detach().clone())
        options["sinks"] = leaves[3]
    for tensor in leaves:
        tensor.requires_grad_()
    before = tuning.configs_of, launch.tma_reads
    if how == "overlap":
        tuning.configs_of = lambda kernel, *_: [tuning.make_config(kernel, 16, 32, 4, 1, True)]
    if how == "descriptors":
        launch.tma_reads = lambda tensor: True
    tuning.autotuned.cache_clear()
    try:
        out = attention(q, k, v, **mask_of(checked, q.device), **options)
        gradients = torch.autograd.grad(out, leaves, d_out)
    finally:
        tuning.configs_of, launch.tma_reads = before
        tuning.autotuned.cache_clear()
    if how == "bshd" and checked.head_dim == checked.value_dim:
        assert out.transpose(1, 2).is_contiguous()
    return dict(zip(("out", *inputs.gradient_names), (out, *gradients), strict=True))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; absolute where the expected is as good as zero (dq where one key is seen)."""
    assert found.shape == expected.shape and found.isfinite().all()
    norm = expected.double().norm()
    typical = max(norm.item(), 1e-5 * math.sqrt(expected.numel()))
    scale = typical if norm.item() == typical else math.sqrt(expected.numel())
    return ((found.double() - expected.double()).norm() / scale).item()


def _errors(checked: Case, how: str = "") -> dict[str, float]:
    inputs = make_inputs(checked, "cpu", 1, with_gradients=True)
    expected = reference(checked, inputs, with_gradients=True)
    found = _run(checked, inputs, how)
    errors = {name: _difference(found[name], expected[name]) for name in NAMES}
    if inputs.sink is not None:
        right, usual = sink_gradients(checked, inputs, torch.arange(checked.kv_heads))
        errors["d_sink"] = float((found["d_sink"] - right).norm() / (usual * checked.q_heads**0.5))
    return errors


def _latent_errors(checked: Case) -> dict[str, float]:
    from attn_exp.backends.triton import mask_of
    from attn_exp.kernels.triton_attention import attention

    inputs = make_inputs(checked, "cpu", 7, with_gradients=False)
    assert inputs.v_bhsd.data_ptr() == inputs.k_bhsd.data_ptr()
    out = attention(*inputs.qkv, **mask_of(checked, inputs.q_bhsd.device))
    return {"out": _difference(out, reference(checked, inputs, with_gradients=False)["out"])}


def _paged_errors(checked: Case, how: str) -> dict[str, float]:
    from attn_exp.backends.triton import Triton
    from attn_exp.kernels import tuning

    inputs = make_inputs(checked, "cpu", 7, with_gradients=False)
    before = tuning.configs_of
    if how == "overlap":
        tuning.configs_of = lambda kernel, *_: [tuning.make_config(kernel, 16, 32, 4, 1, True)]
    tuning.autotuned.cache_clear()
    try:
        calls = Triton("triton").prepare(checked, inputs)
        # Only what lies in the pages is read.
        inputs.k_bhsd.neg_()
        out = calls.forward()
        inputs.k_bhsd.neg_()
    finally:
        tuning.configs_of = before
        tuning.autotuned.cache_clear()
    return {"out": _difference(out, reference(checked, inputs, with_gradients=False)["out"])}


def _decoded_errors(checked: Case) -> dict[str, float]:
    from attn_exp.backends.triton import Triton
    from attn_exp.kernels import decode, triton_attention

    called, real = [], triton_attention.decode
    triton_attention.decode = lambda *arguments: (called.append(len(arguments)), real(*arguments))[1]
    inputs = make_inputs(checked, "cpu", 7, with_gradients=False)
    try:
        out = Triton("triton").prepare(checked, inputs).forward()
    finally:
        triton_attention.decode = real
    assert called and checked.kv_len >= decode.LEAST_KEYS
    return {"out": _difference(out, reference(checked, inputs, with_gradients=False)["out"])}


def _repeats_bitwise() -> bool:
    checked = case(q_heads=2, kv_heads=1, causal=True)
    inputs = make_inputs(checked, "cpu", 4, with_gradients=True)
    first, second = _run(checked, inputs), _run(checked, inputs)
    return all(torch.equal(first[name], second[name]) for name in NAMES)


def _expanded_gradient() -> float:
    from attn_exp.kernels.triton_attention import attention

    checked = case(causal=True)
    inputs = make_inputs(checked, "cpu", 5, with_gradients=True)
    attention(*inputs.qkv, causal=True).sum().backward()
    ones = Inputs(*inputs.qkv, torch.ones_like(inputs.d_out_bhsd))
    expected = reference(checked, ones, with_gradients=True)
    assert inputs.q_bhsd.grad is not None
    return _difference(inputs.q_bhsd.grad, expected["dq"])


def _opcheck() -> dict[str, str]:
    from attn_exp.kernels import triton_attention

    checked = case(q_heads=4, kv_heads=2, q_len=20, kv_len=20)
    inputs = make_inputs(checked, "cpu", 6, with_gradients=False)
    tensors = [_laid_out(tensor, "bshd") for tensor in inputs.qkv]
    options = (None, None, None, None, None, 0, 0.25, True, 0, None, None)
    sinks = torch.ones(1, 4, 1, 1, requires_grad=True)
    arguments = (*(tensor.detach().requires_grad_() for tensor in tensors), sinks, *options)
    return torch.library.opcheck(triton_attention._forward, arguments)


def _compiled() -> tuple[int, int, bool]:
    from torch._dynamo.testing import CompileCounterWithBackend

    from attn_exp.kernels.triton_attention import attention

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 2, k, v, causal=True).transpose(1, 2).flatten(2) + 1

    checked = case(q_heads=4, kv_heads=2, q_len=20, kv_len=20)
    inputs = make_inputs(checked, "cpu", 7, with_gradients=True)
    counter = CompileCounterWithBackend("aot_eager")
    frames = torch.compile(block, fullgraph=True, backend=counter)
    equal = True
    for _ in range(2):
        found, expected = frames(*inputs.qkv), block(*inputs.qkv)
        equal &= torch.equal(found, expected)
        weights = torch.randn_like(expected)
        for one, other in zip(
            torch.autograd.grad(found, inputs.qkv, weights),
            torch.autograd.grad(expected, inputs.qkv, weights),
            strict=True,
        ):
            equal &= torch.equal(one, other)
    return counter.frame_count, len(counter.graphs), equal
