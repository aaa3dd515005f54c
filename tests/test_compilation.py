import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from fakes import make_request
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_exp.backends import compile as compilation
from attn_exp.backends.base import calls_of
from attn_exp.backends.eager import Eager
from attn_exp.core.record.request import Compile
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure, measure_case

CEILINGS = {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}


class Breaks(Eager):
    """Its attention cannot be one graph."""

    claims = {}

    def prepare(self, case, inputs):
        whole = super().prepare(case, inputs).attention

        def attention(q, k, v):
            torch._dynamo.graph_break()
            return whole(q, k, v)

        return calls_of(attention, inputs)


@torch.library.custom_op("attn_exp_tests::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@shapeless.register_fake
def _(x):
    raise RuntimeError("it's not known on 'two' devices")


class Untraceable(Eager):
    """An operator in its attention has no shapes for tracing, as xFormers' has under torch 2.11."""

    claims = {}

    def prepare(self, case, inputs):
        whole = super().prepare(case, inputs).attention
        return calls_of(lambda q, k, v: whole(shapeless(q), k, v), inputs)


class Restless(Eager):
    """Something that its compiled attention was made for changes with every call."""

    claims = {}

    def prepare(self, case, inputs):
        whole, self.calls = super().prepare(case, inputs).attention, 0

        def attention(q, k, v):
            return whole(q, k, v) + 0 * self.calls

        calls = calls_of(attention, inputs)
        return type(calls)(calls.forward, calls.backward, calls.scope, attention=attention, inputs=inputs)


class Opaque(Eager):
    """Its calls are no function of q, k and v."""

    def prepare(self, case, inputs):
        calls = super().prepare(case, inputs)
        return type(calls)(calls.forward, calls.backward)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("attn_exp.timers.loop.BLOCK_US", 2_000.0)
    monkeypatch.setattr("attn_exp.timers.loop.WARM_UP_US", 1_000.0)


@pytest.fixture
def without_inductor(monkeypatch):
    """Dynamo and AOTAutograd as they are, and no C++ compiler behind them."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, options=None, **rest: real(model, backend="aot_eager", **rest))


def measured(backend, mode="default", passes=("forward", "backward"), **compile_options):
    machine = Machine("cpu", environment={"cpu": "fake"}, ceilings={"float32": dict(CEILINGS)})
    request = make_request({"_target_": backend, "name": "b"}, passes=passes)
    return measure(replace(request, compile=Compile(mode=mode, **compile_options)), machine)


def test_a_compiled_backend_is_one_graph_and_as_right_as_the_plain_one(without_inductor):
    record = measured("attn_exp.backends.eager.Eager")
    assert record.status == "ok", record.reason
    assert (record.compiled.graphs, record.compiled.breaks, record.compiled.recompilations) == (1, {}, 0)
    assert record.label == "b+default"
    assert record.passes["backward"].errors["dq"].relative < record.passes["backward"].errors["dq"].tolerance


def test_compiled_rivals_of_a_duel_keep_what_was_compiled_for_each(without_inductor):
    machine = Machine("cpu", ceilings={"float32": CEILINGS})
    compiled = replace(make_request(), compile=Compile(mode="default"))
    narrow = replace(compiled, backend={"_target_": "attn_exp.backends.eager.Eager", "name": "eager"})
    found = measure_case([compiled, make_request(), narrow, compiled], machine)
    assert [(record.status, record.reason) for record in found] == [("ok", None)] * 4
    assert [record.compiled and record.compiled.graphs for record in found] == [1, None, 1, 1]
    assert all(record.compiled.recompilations == 0 for record in found if record.compiled), (
        "none is another's code anew"
    )


def test_a_break_is_counted_with_its_reason(without_inductor):
    record = measured(f"{__name__}:Breaks")
    assert record.status == "ok", record.reason
    ((reason, count),) = record.compiled.breaks.items()
    assert "graph_break" in reason
    assert count == 2, "once in the frame that is compiled, which cannot inline the other, and once in that other"


def test_a_break_in_what_has_to_be_one_graph_is_a_status(without_inductor):
    record = measured(f"{__name__}:Breaks", fullgraph=True)
    assert record.status == "unsupported"
    assert record.reason.startswith("fullgraph=true, and Dynamo would break the graph: ")
    assert len(record.reason.splitlines()) == 1


def test_a_failed_trace_is_a_status_with_the_reason_and_not_with_a_page_of_arguments(without_inductor):
    record = measured(f"{__name__}:Untraceable")
    assert record.status == "unsupported"
    assert record.reason == "torch.compile cannot trace it: it's not known on 'two' devices"


def test_a_recompilation_while_timing_is_an_error_and_not_a_slow_sample(without_inductor, monkeypatch):
    prepared = []
    real = compilation.without_recompiling

    def restless(scope):
        if prepared:
            prepared[0].calls += 1
        return real(scope)

    load = Restless.prepare
    monkeypatch.setattr(
        Restless, "prepare", lambda self, case, inputs: (prepared.append(self), load(self, case, inputs))[1]
    )
    monkeypatch.setattr("attn_exp.worker.prepare.without_recompiling", restless)
    record = measured(f"{__name__}:Restless")
    assert record.status == "error"
    assert "recompile" in record.reason


def test_a_backward_on_the_memory_of_a_cuda_graph_is_refused():
    for mode in ("max-autotune", "reduce-overhead"):
        record = measured("attn_exp.backends.eager.Eager", mode=mode)
        assert record.status == "unsupported"
        assert "set passes=[forward]" in record.reason


def test_only_a_function_can_be_compiled():
    for backend in (f"{__name__}:Opaque", "attn_exp.backends.compiled.Compiled"):
        record = measured(backend)
        assert (record.status, record.reason.split(":")[0]) == ("unsupported", "b")
        assert "set compile=none" in record.reason


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_itself_compiles_the_formula_with_options_of_its_own():
    # The C++ compiler takes seconds for each pass: a backward is compiled in test_inductor.py.
    record = measured("attn_exp.backends.eager.Eager", passes=("forward",), options={"epilogue_fusion": False})
    assert record.status == "ok", record.reason
    assert record.compiled.graphs == 1


def frames(function, *arguments, fullgraph=True):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=fullgraph)(*arguments), counter.frame_count


def tensors(*shape, count=3):
    return [torch.randn(shape) for _ in range(count)]


CACHES = """
import os
from types import SimpleNamespace
import torch
from attn_exp.backends.compile import use_caches

# A process for each, which both have imported torch.
wanted = os.fork() == 0
use_caches(SimpleNamespace(caches=wanted, backend={"name": "b"}))
import torch._inductor.config
from torch._functorch._aot_autograd.autograd_cache import should_use_local_autograd_cache
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

assert triton_cache_dir(0).endswith(".triton/cache"), triton_cache_dir(0)
says = wanted, not torch._inductor.config.force_disable_caches, should_use_local_autograd_cache()
# A single write, for without a buffer `print` writes in parts, between which the other process writes.
os.write(1, f"{says}\\n".encode())
assert wanted or os.wait()[1] == 0
"""


def test_caches_are_used_or_not_although_torch_was_imported_before_and_inductor_not():
    """As in a worker's first job."""
    ran = subprocess.run([sys.executable, "-c", CACHES], capture_output=True, text=True, check=True)
    assert sorted(ran.stdout.splitlines()) == ["(False, False, False)", "(True, True, True)"]


# As importing torch.nn.attention.bias does. A process that did not would break the graph where it makes the parameters.
torch._dynamo.allow_in_graph(SDPAParams)
PARAMETERS = ("query", "key", "value", "attn_mask", "dropout", "is_causal", "enable_gqa")


def params_of(*operands, mask=None):
    return SDPAParams(*operands, mask, 0.1, True, False)


def fields(params):
    """What `params` say: tensors by identity, for they are not copied."""
    values = [getattr(params, name) for name in PARAMETERS]
    return [id(value) if isinstance(value, torch.Tensor) else value for value in values]


def test_the_parameters_of_sdpa_are_made_in_a_graph_and_returned_with_the_same_tensors():
    *qkv, mask = tensors(2, 3, 8, 4, count=4)

    def made(q, k, v, mask):
        return params_of(q, k, v, mask=mask)

    params, count = frames(made, *qkv, mask)
    assert (type(params), count) == (SDPAParams, 1)
    assert fields(params) == fields(made(*qkv, mask))
    assert params.query is qkv[0] and params.attn_mask is mask


def test_the_parameters_of_sdpa_are_read_in_the_graph_that_makes_them():
    q, k, v = tensors(2, 3, 8, 4)

    def read(q, k, v):
        params = params_of(q, k, v)
        return params, params.query * 2, params.query.shape

    (params, doubled, shape), count = frames(read, q, k, v)
    assert (count, shape) == (1, q.shape)
    torch.testing.assert_close(doubled, 2 * q)
    assert fields(params) == fields(params_of(q, k, v))


def test_the_parameters_of_sdpa_pass_a_graph_break_and_are_an_argument():
    q, k, v = tensors(2, 3, 8, 4)

    def broken(q, k, v):
        added, params = q + 1, params_of(q, k, v)
        torch._dynamo.graph_break()
        return params, added * params.key

    (params, product), count = frames(broken, q, k, v, fullgraph=False)
    assert count == 2
    assert fields(params) == fields(params_of(q, k, v))
    torch.testing.assert_close(product, (q + 1) * k)

    def given(params, q):
        torch._dynamo.graph_break()
        return params, params.query + q

    (same, total), count = frames(given, params, q, fullgraph=False)
    assert (same is params, count) == (True, 1)
    torch.testing.assert_close(total, 2 * q)


def test_whether_flash_can_be_used_is_asked_in_the_graph():
    operands = tensors(2, 2, 8, 8)

    def asked(q, k, v):
        return can_use_flash_attention(params_of(q, k, v)), q + 1

    (answer, _), count = frames(asked, *operands)
    assert (answer, count) == (asked(*operands)[0], 1)


@pytest.mark.parametrize("allowed", [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]])
def test_the_backends_that_sdpa_may_choose_are_asked_in_the_graph_and_are_those_outside(allowed):
    def asked(q):
        return _cur_sdpa_kernel_backends(), q + 1

    (q,) = tensors(2, 2, count=1)
    everything = asked(q)[0]
    with sdpa_kernel(allowed):
        (found, _), count = frames(asked, q)
        assert (set(found), found, count) == (set(allowed), asked(q)[0], 1)
    assert frames(asked, q)[0][0] == everything != found


def test_an_order_of_preference_compiles_as_one_graph_at_the_shape_of_pytorchs_own_test():
    # 128 x 64 x 64 x 256 in fp16, as in test/dynamo/test_sdpa.py: on a CPU the same numbers in every row of the batch.
    q, k, v = (one.half().expand(128, 64, 64, 256) for one in tensors(1, 1, 64, 256))

    @sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
    def attention(q, k, v):
        return scaled_dot_product_attention(q, k, v)

    out, count = frames(attention, q, k, v)
    assert count == 1
    assert (out.shape, out.dtype) == ((128, 64, 64, 256), torch.float16)
    alone = scaled_dot_product_attention(*(one[:1, :1].float() for one in (q, k, v)))
    torch.testing.assert_close(out[-1:, -1:].float(), alone, atol=5e-3, rtol=3e-3)


def test_an_option_that_inductor_does_not_have_is_named_with_the_nearest():
    record = measured("attn_exp.backends.eager.Eager", options={"epilog_fusion": False})
    assert record.status == "unsupported"
    assert "no option compile.options.epilog_fusion: did you mean 'epilogue_fusion'?" in record.reason


def test_each_backend_has_its_own_entries_in_the_cache_of_autograd(tmp_path, monkeypatch):
    """AOTAutograd's key lacks the backends that SDPA may choose: one would run what another compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    operands = tensors(1, 2, 16, 8)

    def hits(name):
        compilation.use_caches(replace(make_request(), backend={"name": name}, caches=True))
        torch._dynamo.reset()
        compilation.reset_counters()
        torch.compile(lambda q, k, v: scaled_dot_product_attention(q, k, v))(*operands)
        return torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]

    with (
        torch.compiler.config.patch(cache_key_tag="", force_disable_caches=False),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        assert [hits(name) for name in ("one", "two", "one")] == [0, 0, 1]
