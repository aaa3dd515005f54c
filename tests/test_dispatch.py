"""The drop-in that calls what a dispatch table picks: eager, in training, under torch.compile, and in transformers."""

import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_exp import dispatch
from attn_exp.backends.eager import Eager
from attn_exp.core.case.case import Case
from attn_exp.core.dispatch_table import Bucket, DispatchTable, facts_of, write_table
from attn_exp.core.errors import UserError
from attn_exp.dispatch import dispatcher
from attn_exp.worker.machine.environment import environment

SDPA = F.scaled_dot_product_attention
BACKENDS = {
    "flash": {"_target_": "attn_exp.backends.sdpa.Flash", "name": "flash"},
    "math": {"_target_": "attn_exp.backends.sdpa.Math", "name": "math"},
    "auto (flash)": {"_target_": "attn_exp.backends.sdpa.Sdpa", "name": "auto"},
    "eager": {"_target_": "attn_exp.backends.eager.Eager", "name": "eager"},
}
# At which length a table picks what, in inference and in training.
PICKS = {16: ("math", "eager"), 32: ("flash", "math"), 64: ("eager", "flash"), 128: ("auto (flash)", "auto (flash)")}
OPERATOR = {
    "math": "aten::_scaled_dot_product_attention_math",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "auto (flash)": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "eager": "aten::softmax",
}


def case(length, **changes):
    sizes = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": length, "kv_len": length, "head_dim": 8, "value_dim": 8}
    return Case(**sizes | {"dtype": "float32", "causal": True, "align": "top_left"} | changes)


def bucket(length, pick, mode, **changes):
    times = {label: 1.0 if label == pick else 2.0 for label in BACKENDS}
    return Bucket(mode=mode, case=case(length, **changes), pick=pick, times_us=times)


def table_here(**changes):
    buckets = [
        bucket(length, pick, mode)
        for length, picks in PICKS.items()
        for mode, pick in zip(("inference", "training"), picks, strict=True)
    ]
    made = DispatchTable(
        made_by="attn-exp pick first",
        fingerprint=facts_of("cpu", environment("cpu"), []),
        backends=BACKENDS,
        buckets=tuple(buckets),
    )
    return replace(made, **changes)


@pytest.fixture
def loaded(tmp_path):
    def load(other_gpu="refuse", **changes):
        write_table(table_here(**changes), tmp_path / "table.json")
        return dispatch.load(tmp_path / "table.json", other_gpu)

    return load


@pytest.fixture
def picks(loaded):
    return loaded()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    assert F.scaled_dot_product_attention is SDPA


def qkv(length, grad=False):
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, 2, length, 8, generator=generator, requires_grad=grad) for _ in range(3))


def operators(function, *arguments, **keys):
    """The names of the ATen operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*arguments, **keys)
    return {event.key for event in profile.key_averages()}


def gradients_close(one, other):
    """Compare gradients of another summation order: each sums up to `length` terms of about 10, some to zero."""
    torch.testing.assert_close(one, other, rtol=1.3e-6, atol=1e-4)


@pytest.mark.parametrize("length", PICKS)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_picked_backend_runs_and_computes_the_same(picks, length, mode):
    label = PICKS[length][mode == "training"]
    q, k, v = qkv(length, grad=mode == "training")
    ran = operators(picks.attention, q, k, v, is_causal=True)
    assert OPERATOR[label] in ran and not ran & (set(OPERATOR.values()) - {OPERATOR[label], "aten::softmax"})
    out, expected = picks.attention(q, k, v, is_causal=True), SDPA(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)
    if mode == "training":
        gradients_close(*(torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (out, expected)))
        with torch.no_grad():
            assert OPERATOR[PICKS[length][0]] in operators(picks.attention, q, k, v, is_causal=True)


def test_a_call_unknown_to_the_table_is_left_to_sdpa_with_its_arguments(picks):
    q, k, v = qkv(16)
    mask = torch.zeros(16, 16)
    half = tuple(one.bfloat16() for one in (q, k, v))
    flash = OPERATOR["flash"]
    assert flash in operators(picks.attention, q, k, v, attn_mask=mask)
    assert flash in operators(picks.attention, *half, is_causal=True)
    # Full attention was not measured.
    assert flash in operators(picks.attention, q, k, v)
    torch.testing.assert_close(picks.attention(q, k, v, mask, scale=0.3), SDPA(q, k, v, mask, scale=0.3))
    with pytest.raises(RuntimeError):
        picks.attention(q, k[:, :, :, :4], v)
    with torch.no_grad():
        assert picks.attention(q, k, v, dropout_p=1.0, is_causal=True).count_nonzero() == 0


def test_switches_and_random_numbers_are_as_before(picks):
    state = torch.get_rng_state()
    with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]):
        before = torch.backends.cuda.flash_sdp_enabled()
        for length in PICKS:
            # Flash is switched off by whoever calls.
            assert OPERATOR["flash"] not in operators(picks.attention, *_seeded(length), is_causal=True)
        assert torch.backends.cuda.flash_sdp_enabled() == before is False
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def _seeded(length):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, 2, length, 8, generator=generator) for _ in range(3))


def test_as_a_context_it_takes_the_place_of_pytorchs_function(picks):
    q, k, v = qkv(16)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    with picks, picks:
        assert F.scaled_dot_product_attention == picks.attention
        assert OPERATOR["math"] in operators(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        layer(torch.randn(1, 16, 16))
    assert OPERATOR["flash"] in operators(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def model(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile_the_choice_is_in_the_graph_without_a_break(picks, dynamic):
    graphs = []

    def backend(graph, inputs):
        graphs.append([(str(node.target), node.args) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    with picks:
        for length in (16, 32, 64, 128, 16, 64):
            q, k, v = qkv(length)
            torch.testing.assert_close(compiled(q, k, v), 2 * SDPA(q, k, v, is_causal=True))
    third, default = graphs[2:]
    named = [next((args for target, args in one if "_backend_from_string" in target), None) for one in graphs]
    assert named == [("MATH",), ("FLASH_ATTENTION",), None, None]
    assert any("softmax" in target for target, _ in third) and not any("softmax" in target for target, _ in default)
    # Without the dispatcher another graph runs, and what the traced context did to the switches is undone.
    assert OPERATOR["flash"] in operators(compiled, *qkv(16))
    assert torch.backends.cuda.flash_sdp_enabled()


def gradients(function, *arguments):
    return torch.autograd.grad(function(*arguments).square().sum(), arguments)


def test_training_compiles_through_autograd_with_the_picked_operators(picks):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with picks:
        for length in (16, 32, 64):
            q, k, v = qkv(length, grad=True)
            ran = operators(gradients, compiled, q, k, v)
            flash = "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in ran
            assert flash == (PICKS[length][1] == "flash"), length
            eager = gradients(lambda *given: 2 * SDPA(*given, is_causal=True), q, k, v)
            gradients_close(gradients(compiled, q, k, v), eager)


def test_autocast_decides_the_dtype(loaded):
    picks = loaded(buckets=(bucket(16, "eager", "inference", dtype="bfloat16"),))
    q, k, v = qkv(16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert OPERATOR["eager"] in operators(picks.attention, q, k, v, is_causal=True)
        assert picks.attention(q, k, v, is_causal=True).dtype == torch.bfloat16
        with picks:
            assert torch.compile(model, fullgraph=True, backend="eager")(q, k, v).dtype == torch.bfloat16


def test_beyond_the_measured_shapes_it_says_so_once(picks):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for length in (512, 600, 512):
            picks.attention(*qkv(length), is_causal=True)
    (said,) = [str(one.message) for one in seen]
    assert "s512" in said and "beyond all that was measured: q_len 512 (measured up to 128)" in said
    assert "auto (flash)" in said


def test_a_length_within_a_known_eighth_octave_needs_no_case_of_its_own(picks, monkeypatch):
    made, make = [], dispatcher._case
    monkeypatch.setattr(dispatcher, "_case", lambda seen: made.append(seen[1][2]) or make(seen))
    for length in range(104, 128):
        q, k, v = qkv(length)
        torch.testing.assert_close(picks.attention(q[:, :, -1:], k, v), SDPA(q[:, :, -1:], k, v))
    assert made == [104, 105, 113, 121]


def test_a_length_that_is_refused_decides_nothing_for_its_eighth_octave(picks, monkeypatch):
    def call(length, of_values=0):
        q, k, v = (tensor.shape for tensor in qkv(length))
        v = (*v[:2], of_values or length, v[3])
        return picks._find((q, k, v, torch.float32, False, False, True, None, False))

    monkeypatch.setattr(Eager, "unsupported", lambda self, case, device: "odd" if case.kv_len % 4 else None)
    assert [call(length).function is not None for length in (66, 68, 65)] == [False, True, False]
    assert (call(34, of_values=35).order, call(34).order[0]) == ((), SDPBackend.FLASH_ATTENTION)


def test_a_choice_says_why(picks):
    measured = picks.choice(batch=1, q_heads=2, q_len=16, head_dim=8, dtype="float32", causal=True)
    assert (measured.label, measured.how) == ("math", "measured")
    training = picks.choice("training", batch=1, q_heads=2, q_len=16, head_dim=8, dtype="float32", causal=True)
    assert training.label == "eager"
    near = picks.choice(batch=1, q_heads=2, q_len=20, head_dim=8, dtype="float32", causal=True)
    assert near.how == "nearest" and "nearest of what was measured: b1 h2 s16 d8 fp32 causal, " in near.why


def test_a_length_counts_as_its_tiles(loaded):
    picks = loaded(buckets=(bucket(256, "math", "inference"), bucket(384, "eager", "inference")))
    shape = {"batch": 1, "q_heads": 2, "head_dim": 8, "dtype": "float32", "causal": True}
    # 264 begins the third tile of 128, which 384 fills.
    assert [picks.choice(q_len=length, **shape).label for length in (248, 264)] == ["math", "eager"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_len": float("nan")}, "q_len=nan is not a whole number"),
        ({"q_heads": 3, "kv_heads": 2}, "kv_heads=2 does not divide q_heads=3"),
        ({"dtype": "int4"}, "dtype 'int4' is not one of"),
        ({"length": 4}, "unexpected keyword argument 'length'"),
        ({"mode": "serving"}, "mode='serving' is not one of inference, training"),
    ],
)
def test_impossible_shapes_are_one_sentence(picks, changes, said):
    with pytest.raises(UserError, match=said):
        picks.choice(**{"batch": 1, "q_heads": 2, "q_len": 16, "head_dim": 8, "dtype": "float32"} | changes)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"torch": "1.0"}, r"was measured with torch 1\.0 and not .* as here"),
        ({"cpu": "Pentium"}, "cpu Pentium and not"),
        ({"device": "cuda", "gpu": "NVIDIA H200"}, "was measured on NVIDIA H200, and this machine has no GPU"),
    ],
)
def test_another_machine_or_torch_refuses_or_warns(loaded, facts, said):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    facts = table_here().fingerprint | facts
    with pytest.raises(UserError, match=said) as refused:
        loaded(fingerprint=facts)
    assert "other_gpu='warn'" in str(refused.value)
    if facts["device"] == "cpu":
        with pytest.warns(UserWarning, match=said):
            assert loaded("warn", fingerprint=facts).attention(*qkv(16), is_causal=True).shape == (1, 2, 16, 8)
    with pytest.raises(UserError, match="neither 'refuse' nor 'warn'"):
        loaded("ignore")


def test_a_backend_that_is_not_installed_refuses_or_is_left_out(loaded):
    fa3 = {"fa3": {"_target_": "attn_exp.backends.fa3.FlashAttention3", "name": "fa3"}}
    one = replace(bucket(16, "math", "inference"), pick="fa3", times_us={"fa3": 1.0, "math": 2.0, "eager": 3.0})
    changes = {"backends": BACKENDS | fa3, "buckets": (one,)}
    with pytest.raises(UserError, match="picks fa3 for 1 shapes, and flash_attn_3 is not installed: "):
        loaded(**changes)
    with pytest.warns(UserWarning, match="fa3"):
        picks = loaded("warn", **changes)
    with torch.no_grad():
        assert OPERATOR["math"] in operators(picks.attention, *qkv(16), is_causal=True)


def test_a_table_names_no_code_of_others(loaded):
    theirs = {"eager": {"_target_": "os.system", "name": "echo"}}
    with pytest.raises(UserError, match=r"names the class os\.system, which is no backend of attn_exp"):
        loaded(backends=BACKENDS | theirs)


class Interface(dict):
    """What transformers' GeneralInterface does: names that all instances share."""

    registered: dict = {}

    @classmethod
    def register(cls, key, value):
        cls.registered[key] = value


def stand_in(monkeypatch):
    """A module with the contract of transformers 5.23, of what `register` uses."""
    attention = type("AttentionInterface", (Interface,), {"registered": {}})
    mask = type("AttentionMaskInterface", (Interface,), {"registered": {}})
    delegated = []

    def sdpa_attention_forward(layer, query, key, value, attention_mask, **more):
        delegated.append(more)
        out = SDPA(query, key, value, attn_mask=attention_mask, scale=more["scaling"])
        return out.transpose(1, 2).contiguous(), None

    modules = {
        "transformers": {"AttentionInterface": attention, "AttentionMaskInterface": mask},
        "transformers.integrations": {},
        "transformers.integrations.sdpa_attention": {"sdpa_attention_forward": sdpa_attention_forward},
        "transformers.masking_utils": {"sdpa_mask": object()},
    }
    for name, members in modules.items():
        made = types.ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
    return attention, mask, delegated


@pytest.mark.filterwarnings("ignore:.*is beyond all that was measured")
def test_transformers_gets_an_attention_function_and_its_masks(picks, monkeypatch):
    attention, mask, delegated = stand_in(monkeypatch)
    assert picks.register("mine") == "mine"
    assert mask.registered["mine"] is sys.modules["transformers.masking_utils"].sdpa_mask
    forward = attention.registered["mine"]
    layer = types.SimpleNamespace(is_causal=True)
    q, k, v = qkv(16)
    with torch.no_grad():
        assert OPERATOR["math"] in operators(forward, layer, q, k, v, None, scaling=8**-0.5, sliding_window=None)
        out, weights = forward(layer, q, k, v, None, scaling=8**-0.5)
        assert weights is None and not delegated
        torch.testing.assert_close(out, SDPA(q, k, v, is_causal=True).transpose(1, 2))
        # One query sees every key; grouped heads are not repeated; an empty cache behind the prompt is left out.
        one = forward(layer, q[:, :, :1], k, v, None)[0]
        torch.testing.assert_close(one, SDPA(q[:, :, :1], k, v).transpose(1, 2))
        grouped = forward(layer, q, k[:, :1], v[:, :1], None)[0]
        torch.testing.assert_close(
            grouped, SDPA(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True).transpose(1, 2)
        )
        cut = forward(layer, q[:, :, :8], k, v, None)[0]
        torch.testing.assert_close(cut, SDPA(q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True).transpose(1, 2))
        full = forward(layer, q, k, v, None, is_causal=False)[0]
        torch.testing.assert_close(full, SDPA(q, k, v).transpose(1, 2))
        # What it does not know goes to transformers' own.
        forward(layer, q, k, v, torch.zeros(16, 16), scaling=0.2)
        forward(layer, q, k, v, None, scaling=0.2, softcap=30.0)
        assert [more.get("softcap") for more in delegated] == [None, 30.0]


def test_transformers_decodes_with_the_pick_of_one_query(loaded, monkeypatch):
    decoding = case(1, kv_len=16, causal=False)
    times = {"eager": 1.0, "math": 2.0}
    buckets = (bucket(16, "math", "inference"), Bucket(mode="inference", case=decoding, pick="eager", times_us=times))
    picks = loaded(buckets=buckets)
    attention, _, _ = stand_in(monkeypatch)
    forward = attention.registered[picks.register("mine")]
    q, k, v = qkv(16)
    layer = types.SimpleNamespace(is_causal=True)
    with torch.no_grad():
        ran = operators(forward, layer, q[:, :, :1], k, v, None)
    assert OPERATOR["eager"] in ran and OPERATOR["math"] not in ran


@pytest.mark.filterwarnings("ignore:.*is beyond all that was measured")
def test_a_model_of_transformers_computes_the_same(picks):
    transformers = pytest.importorskip("transformers")
    name = picks.register()
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    models = []
    for implementation in ("sdpa", name):
        torch.manual_seed(0)
        models.append(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation=implementation))
        )
    tokens = torch.randint(0, 32, (1, 16))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 12, dtype=torch.long)], 1)
    for mask in (None, padded):
        theirs, ours = (one(tokens, attention_mask=mask, labels=tokens) for one in models)
        torch.testing.assert_close(ours.logits, theirs.logits)
    ours.loss.backward()
    # Batch 1, two heads of 8 and 16 tokens in training: the eager formula.
    assert any(call.function is not None for call in picks._calls.values())
    compiled = torch.compile(models[1], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens).logits, models[0](tokens).logits)
