from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import cases

from attn_exp.core.case.case import Case
from attn_exp.core.case.features import APART, FEATURES
from attn_exp.core.case.fields import case_from_config, typed_fields
from attn_exp.core.errors import UserError

SIZES = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 8, "kv_len": 8, "head_dim": 16, "value_dim": 16}
GOOD = SIZES | {"dtype": "bfloat16"}


def config(**changes):
    model = {"q_heads": 12, "kv_heads": None, "head_dim": 64, "value_dim": None, "embedding": None}
    model |= changes.pop("model", {})
    rest = {"batch": 2, "q_len": 8, "kv_len": 16, "causal": True, "align": "top_left", "dtype": {"name": "float16"}}
    rest |= {
        "window": None,
        "prefix": None,
        "chunk": None,
        "block": None,
        "softcap": None,
        "sink": False,
        "alibi": False,
        "bias": None,
        "latent": False,
        "page_size": None,
        "pages": None,
        "cache_dtype": "auto",
        "lengths": None,
        "kv_lengths": None,
        "layout": "bhsd",
        "workload": "attention",
        "mlp_dim": None,
        "embed_dim": None,
        "tp": 1,
    }
    return {"model": model} | rest | changes


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, "8", None, 1 << 40])
def test_a_size_that_is_no_positive_integer_of_sane_size_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"^{name}="):
        Case(**GOOD | {name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float8"}, "'float8' is not one of bfloat16, float16, float32"),
        ({"causal": 1}, "causal=1 is neither true nor false"),
        ({"align": "left"}, "'left' is not one of bottom_right, top_left"),
    ],
)
def test_an_unknown_word_is_refused_with_the_choices(change, message):
    with pytest.raises(UserError, match=message):
        Case(**GOOD | change)


@pytest.mark.parametrize(("q_heads", "kv_heads", "use"), [(12, 5, 4), (12, 24, 12), (9, 6, 3)])
def test_kv_heads_that_do_not_divide_are_refused_with_the_nearest_divisor(q_heads, kv_heads, use):
    # 3 and 9 are equally near to 6: the smaller one wins
    with pytest.raises(UserError, match=f"kv_heads={kv_heads} does not divide q_heads={q_heads}: use .*={use},"):
        Case(**GOOD | {"q_heads": q_heads, "kv_heads": kv_heads})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi": 3}, "alibi=3 is neither true nor false"),
        ({"bias": "head"}, "bias='head' is not one of heads, shared; null is no bias"),
        ({"softcap": 0}, "softcap=0 is not a positive number; null is no softcap"),
        ({"page_size": 0}, "page_size=0 is not a whole number of keys from 1 to 256; null is no pages"),
        ({"page_size": 16, "cache_dtype": "fp4"}, "cache_dtype='fp4' is neither auto nor fp8"),
        ({"page_size": 16, "pages": "random"}, "pages='random' is not one of shuffled, linear, shared"),
        ({"latent": True, "value_dim": 17}, "set model.value_dim=16 or less, or latent=false"),
        ({"batch": 1, "lengths": (8, -1)}, "must be whole numbers, one of them positive"),
    ],
)
def test_a_wrong_value_of_a_feature_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        Case(**GOOD | change)


@pytest.mark.parametrize(("kind", "other"), [(kind, other) for kind, others in APART.items() for other in others])
def test_kinds_that_do_not_go_together_are_refused_with_what_to_set(kind, other):
    having = {
        "bias": "heads",
        "latent": True,
        "page_size": 16,
        "sink": True,
        "alibi": True,
        "quantised": {"dtype": "int8"},
        "lengths": {"batch": 1, "lengths": (5, 3)},
        "workload": {"workload": "decoder_layer", "mlp_dim": 64, "causal": True},
    }
    changes = [having[name] if isinstance(having[name], dict) else {name: having[name]} for name in (kind, other)]
    unset = FEATURES[other].unset if other in FEATURES else "dtype=bf16"
    with pytest.raises(UserError, match=f"^{kind}=.* has no .*: set {unset}, or "):
        Case(**GOOD | changes[0] | changes[1])


def test_a_tensor_beyond_a_tebibyte_is_refused_and_one_of_exactly_that_is_not():
    fits = {"batch": 1 << 10, "q_heads": 1 << 4, "q_len": 1 << 18, "head_dim": 128, "value_dim": 64}
    Case(**GOOD | fits)
    for beyond in ({"batch": 1025}, {"value_dim": 129}, {"dtype": "float32"}, {"kv_len": 1 << 25}):
        with pytest.raises(UserError, match="TiB"):
            Case(**GOOD | fits | beyond)
    with pytest.raises(UserError, match="lower seq_len, or set bias=shared"):
        Case(**GOOD | {"bias": "heads", "q_heads": 64, "q_len": 1 << 20, "kv_len": 1 << 20})


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "b2 h4/2 s8 d16 bf16 full"),
        ({"kv_heads": 4, "causal": True}, "b2 h4 s8 d16 bf16 causal"),
        ({"kv_len": 9, "value_dim": 8}, "b2 h4/2 q8 kv9 d16/8 bf16 full"),
        ({"kv_len": 9, "causal": True}, "b2 h4/2 q8 kv9 d16 bf16 causal bottom_right"),
        ({"kv_len": 9, "causal": True, "align": "top_left"}, "b2 h4/2 q8 kv9 d16 bf16 causal top_left"),
    ],
)
def test_the_label_says_what_differs_and_no_more(change, label):
    assert Case(**GOOD | change).label() == label


@given(cases(), cases())
def test_two_cases_with_one_label_are_one_problem(one, other):
    def problem(case):
        # Without a mask, and where lengths are equal, both alignments are the same problem.
        return asdict(case) | {"align": case.align if case.causal and not case.square else None}

    assert (one.label() == other.label()) == (problem(one) == problem(other))


def test_a_configuration_becomes_its_case_with_defaults_from_the_heads():
    assert case_from_config(config()) == Case(
        batch=2, q_heads=12, kv_heads=12, q_len=8, kv_len=16, head_dim=64, value_dim=64,
        dtype="float16", causal=True, align="top_left",
    )  # fmt: skip
    given_all = case_from_config(config(model={"kv_heads": 3, "value_dim": 32}))
    assert (given_all.kv_heads, given_all.value_dim) == (3, 32)


@given(st.integers(1, 64), st.integers(1, 64))
def test_an_embedding_is_shared_out_among_the_heads(heads, dim):
    case = case_from_config(config(model={"head_dim": None, "embedding": heads * dim, "q_heads": heads}))
    assert (case.q_heads, case.head_dim) == (heads, dim)


def test_embed_dim_replaces_the_sizes_of_the_models_heads():
    case = case_from_config(config(embed_dim=1536, model={"value_dim": 32}))
    assert (case.head_dim, case.value_dim, case.embed_dim) == (128, 128, 1536)
    with pytest.raises(UserError, match=r"q_heads=12 does not divide embed_dim=1000: use model\.q_heads=10"):
        case_from_config(config(embed_dim=1000))
    with pytest.raises(UserError, match=r"whole embed_dim and model\.q_heads"):
        case_from_config(config(embed_dim="wide"))


@pytest.mark.parametrize(
    ("tp", "q_heads", "kv_heads", "shard"),
    [(1, 32, 8, (32, 8)), (4, 32, 8, (8, 2)), (8, 64, 4, (8, 1)), (16, 128, 1, (8, 1)), (4, 12, None, (3, 3))],
)
def test_a_shard_has_its_part_of_the_heads(tp, q_heads, kv_heads, shard):
    case = case_from_config(config(tp=tp, model={"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 64}))
    assert (case.q_heads, case.kv_heads, case.head_dim) == (*shard, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 8}, "tp=8 GPUs cannot share 12 query heads and 12 key-value heads: set tp=6"),
        ({"tp": 4, "model": {"kv_heads": 6}}, "tp=4 GPUs cannot share 12 query heads and 6 key-value heads: set tp=3"),
        ({"tp": 0}, "tp=0 is not a whole number of GPUs: set tp=1, 2, 4 or 8"),
        ({"tp": 2, "workload": "decoder_layer"}, "is a block of one GPU: set tp=1, or workload=attention"),
    ],
)
def test_heads_that_cannot_be_shared_are_one_sentence(changes, message):
    with pytest.raises(UserError, match=message):
        case_from_config(config(**changes))


@pytest.mark.parametrize(
    ("typed", "lengths", "kv_lengths"),
    [
        ("2q2k_3q1s1k", (2048, 2048, 1, 1, 1), (2048, 2048, 1024, 1024, 1024)),
        ("q7", (7,), None),
        ("2q16", (16, 16), None),
        ("q4s9_q2", (4, 2), (9, 2)),
        ("q0s1k_q4s9_q0", (0, 4, 0), (1024, 9, 0)),
    ],
)
def test_requests_are_written_as_in_vllm(typed, lengths, kv_lengths):
    made = case_from_config(
        config(lengths=typed, batch=1, q_len=8, kv_len=8, align="bottom_right", model={"seq_len": 8})
    )
    assert (made.lengths, made.kv_lengths) == (lengths, kv_lengths)
    assert (made.q_len, made.kv_len) == (sum(lengths), sum(kv_lengths or lengths))
    assert typed_fields(made, square=made.square)["lengths"] == typed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "2q"}, "lengths=2q is no batch of requests: write lengths=2q2k_32q1s1k"),
        ({"lengths": "0q5"}, "has 0 requests: from 1 to 65,536"),
        ({"lengths": "q5s3"}, "a request has 5 queries and only 3 keys"),
        ({"lengths": "q0s3"}, r"lengths=\[0\] must be whole numbers, one of them positive"),
        ({"lengths": [2, 0], "kv_lengths": [1, 5]}, "a request has 2 queries and only 1 keys"),
        ({"lengths": "q2s3", "kv_lengths": [3]}, "has the keys of its requests: set kv_lengths=null"),
        ({"lengths": [2], "kv_lengths": 3}, "kv_lengths=3 is no list"),
        ({"lengths": [2, 3], "kv_lengths": [3]}, "kv_lengths has 1 numbers, and lengths 2"),
        ({"lengths": [2], "kv_lengths": [0]}, r"kv_lengths=\[0\] must be whole numbers, one of them positive"),
        ({"lengths": None, "kv_lengths": [3]}, "set lengths too, or kv_lengths=null"),
        ({"lengths": "q2s3", "align": "top_left"}, "set align=bottom_right"),
    ],
)
def test_a_batch_of_requests_that_cannot_be_is_refused(changes, message):
    rest = {"batch": 1, "q_len": 8, "kv_len": 8, "align": "bottom_right", "model": {"seq_len": 8}}
    with pytest.raises(UserError, match=message):
        case_from_config(config(**rest | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": 4}, "prefix=4 adds keys to a causal mask: set causal=true, or prefix=null"),
        ({"chunk": 4}, "chunk=4 cuts a causal mask"),
        ({"causal": True, "chunk": 0}, "chunk=0 is not a positive number of keys; null is no chunk"),
        ({"causal": True, "prefix": 2, "chunk": 4}, "are two masks: set"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        Case(**GOOD | change)
