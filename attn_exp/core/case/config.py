"""Make the case that a composed configuration describes."""

from dataclasses import fields
from typing import Any

from attn_exp.core.case.case import LARGEST, WORKLOADS, Case, nearest_divisor
from attn_exp.core.case.fields import SWITCHES
from attn_exp.core.case.packed import packed_lengths
from attn_exp.core.errors import UserError

_LARGEST_EMBEDDING = 1 << 24
# The fields of a case that are not a key of the configuration as it is.
_MADE = {"dtype", "lengths", "kv_lengths", "cache_dtype", "workload", "mlp_dim", *SWITCHES}


def case_from_config(config: dict[str, Any]) -> Case:
    """Return the case of a composed configuration: `model`, `dtype`, and the keys that are fields of `Case`.

    Raises:
        UserError: as `Case`; also if the heads do not divide the embedding, or a size is missing.
    """
    model, width = config["model"], "model.embedding"
    if config["embed_dim"] is not None:
        width = "embed_dim"
        model = {**model, "embedding": config["embed_dim"], "head_dim": None, "value_dim": None}
    head_dim = model.get("head_dim")
    if head_dim is None:
        embedding, q_heads = model.get("embedding"), model.get("q_heads")
        if not _size(embedding) or not _size(q_heads):
            raise UserError(f"the model needs model.head_dim, or whole {width} and model.q_heads")
        if embedding % q_heads:
            raise UserError(
                f"q_heads={q_heads} does not divide {width}={embedding}: "
                f"use model.q_heads={nearest_divisor(embedding, q_heads)}, or another divisor"
            )
        head_dim = embedding // q_heads
    elif (
        model.get("embedding") is not None
        and _size(model.get("q_heads"))
        and _size(head_dim)
        and model["embedding"] != model["q_heads"] * head_dim
    ):
        raise UserError(
            f"embedding={model['embedding']} is not q_heads x head_dim = {model['q_heads']} x {head_dim}: "
            "set model.head_dim=null, or leave the embedding out"
        )
    lengths, kv_lengths = packed_lengths(config["lengths"], config["kv_lengths"])
    # The length of a packed case is the sum of its sequences; an explicit length has to agree.
    model_len = model.get("seq_len")
    for key, own in (("q_len", lengths), ("kv_len", kv_lengths or lengths)):
        if own and all(isinstance(length, int) and length > 0 for length in own) and config[key] == model_len:
            config = config | {key: sum(own)}
    seq_len = config.get("seq_len")
    if not _is_length(seq_len) and seq_len == config["q_len"] == config["kv_len"]:
        # Typed once as seq_len; the case would refuse q_len, which was not typed.
        raise UserError(f"seq_len={seq_len!r} is not a whole number from 1 to {LARGEST['q_len']:,}")
    no_block = config["workload"] == WORKLOADS[0]
    q_heads = model.get("q_heads")
    as_typed = {one.name: config[one.name] for one in fields(Case) if one.name in config and one.name not in _MADE}
    # A model may leave a feature out.
    as_typed |= {name: False if config[name] is None else config[name] for name in SWITCHES}
    case = Case(
        **as_typed,
        q_heads=q_heads,
        kv_heads=q_heads if model.get("kv_heads") is None else model["kv_heads"],
        head_dim=head_dim,
        value_dim=head_dim if model.get("value_dim") is None else model["value_dim"],
        dtype=config["dtype"]["name"],
        lengths=lengths,
        kv_lengths=kv_lengths,
        cache_dtype=None if config["cache_dtype"] == "auto" else config["cache_dtype"],
        workload=None if no_block else str(config["workload"]),
        mlp_dim=None if no_block else config["mlp_dim"],
    )
    for key, unset in (("pages", None), ("cache_dtype", "auto")):
        if config[key] != unset and case.page_size is None:
            raise UserError(f"{key}={config[key]} is of a paged cache: set cache=paged, or {key}={unset or 'null'}")
    if case.pages == "shared" and not case.shared_keys:
        raise UserError("pages=shared needs two requests that fill two pages each: set batch=2, or a smaller page_size")
    return case


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST["q_len"]


def _size(value: Any) -> bool:
    """Whether a value is a positive integer of plausible size."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_EMBEDDING
