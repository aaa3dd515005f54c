"""The fields of cases as configurations, command lines, tables and files have them."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from attn_exp.core.case.case import LARGEST, TYPED_DTYPES, WORKLOADS, Case, nearest_divisor
from attn_exp.core.case.features import SWITCHES
from attn_exp.core.case.masks import KINDS, Numbered
from attn_exp.core.errors import UserError

Lengths = tuple[int, ...]

_LARGEST_EMBEDDING = 1 << 24
# The fields of a case that are not a key of the configuration as it is.
_MADE = {"dtype", "lengths", "kv_lengths", "cache_dtype", "workload", "mlp_dim", *SWITCHES}
_REQUESTS = re.compile(
    r"(?P<count>[0-9]{1,6})?q(?P<queries>[0-9]{1,9})(?P<q_k>k)?(?:s(?P<keys>[0-9]{1,9})(?P<s_k>k)?)?"
)
_MOST_REQUESTS = 1 << 16
# The fields that `Case.mask` names in one word.
MASK_FIELDS = ("causal", *KINDS)


@cache
def case_columns() -> tuple[str, ...]:
    """Return the names of a case's fields in the order of tables and files."""
    return tuple(field.name for field in fields(Case))


def with_mask(cases: Iterable[Case]) -> bool:
    """Return whether cases differ in more of their masks than causal or not: each mask is best named as a whole.

    Cases whose masks differ in only a number, as windows do, are best told apart by that number.
    """
    return len({type(case.mask) if isinstance(case.mask, Numbered) else None for case in cases}) > 1


def typed_fields(case: Case, *, square: bool) -> dict[str, Any]:
    """Return a case's fields as a command line has them: `dtype` bf16, and if `square` one `seq_len` for both lengths.

    Packed sequences are one word, such as 2q2k_32q1s1k, with the keys that they have.

    Files and records have the fields of `case_columns`, and PyTorch's names of dtypes.
    """
    values = {name: getattr(case, name) for name in case_columns() if not (square and name == "kv_len")}
    # A feature that the case lacks is None.
    values |= {"dtype": TYPED_DTYPES[case.dtype], **{name: getattr(case, name) or None for name in SWITCHES}}
    if case.lengths is not None:
        values |= {"lengths": typed_lengths(case.lengths, case.kv_lengths), "kv_lengths": None}
    return {"seq_len" if square and name == "q_len" else name: value for name, value in values.items()}


def case_from_config(config: dict[str, Any]) -> Case:
    """Return the case of a composed configuration: `model`, `dtype`, and the keys that are fields of `Case`.

    Raises:
        UserError: as `Case`; also if the heads do not divide the embedding, or a size is missing.
    """
    model, width = config["model"], "model.embedding"
    if config["embed_dim"] is not None:
        width = "embed_dim"
        model = {**model, "embedding": config["embed_dim"], "head_dim": None, "value_dim": None}
    head_dim, embedding, q_heads = (model.get(name) for name in ("head_dim", "embedding", "q_heads"))
    if head_dim is None:
        if not _is_size(embedding) or not _is_size(q_heads):
            raise UserError(f"the model needs model.head_dim, or whole {width} and model.q_heads")
        if embedding % q_heads:
            raise UserError(
                f"q_heads={q_heads} does not divide {width}={embedding}: "
                f"use model.q_heads={nearest_divisor(embedding, q_heads)}, or another divisor"
            )
        head_dim = embedding // q_heads
    elif embedding is not None and _is_size(q_heads) and _is_size(head_dim) and embedding != q_heads * head_dim:
        raise UserError(
            f"embedding={embedding} is not q_heads x head_dim = {q_heads} x {head_dim}: "
            "set model.head_dim=null, or leave the embedding out"
        )
    lengths, kv_lengths = packed_lengths(config["lengths"], config["kv_lengths"])
    # The length of a packed case is the sum of its sequences; an explicit length has to agree.
    model_len = model.get("seq_len")
    for key, own in (("q_len", lengths), ("kv_len", kv_lengths or lengths)):
        whole = all(isinstance(length, int) and length >= 0 for length in own or ())
        if own and whole and any(own) and config[key] == model_len:
            config = config | {key: sum(own)}
    seq_len = config.get("seq_len")
    if not _is_size(seq_len, LARGEST["q_len"]) and seq_len == config["q_len"] == config["kv_len"]:
        # Typed once as seq_len; the case would refuse q_len, which was not typed.
        raise UserError(f"seq_len={seq_len!r} is not a whole number from 1 to {LARGEST['q_len']:,}")
    no_block = config["workload"] == WORKLOADS[0]
    q_heads, kv_heads = shard(q_heads, model.get("kv_heads"), config["tp"])
    if config["tp"] != 1 and not no_block:
        raise UserError(f"workload={config['workload']} is a block of one GPU: set tp=1, or workload=attention")
    as_typed = {one.name: config[one.name] for one in fields(Case) if one.name in config and one.name not in _MADE}
    # A model may leave a feature out.
    as_typed |= {name: False if config[name] is None else config[name] for name in SWITCHES}
    case = Case(
        **as_typed,
        q_heads=q_heads,
        kv_heads=kv_heads,
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


def shard(q_heads: Any, kv_heads: Any, tp: Any) -> tuple[Any, Any]:
    """Return the query and key-value heads of one of `tp` GPUs, as many of both if `kv_heads` is None.

    Fewer key-value heads than GPUs are replicated, as in vLLM
    (https://github.com/vllm-project/vllm/blob/main/vllm/config/model.py). Raises UserError if they cannot be shared so.
    """
    if not _is_size(tp):
        raise UserError(f"tp={tp} is not a whole number of GPUs: set tp=1, 2, 4 or 8")
    kv_heads = q_heads if kv_heads is None else kv_heads
    # `Case` says what a number of heads has to be.
    if tp == 1 or not _is_size(q_heads, LARGEST["q_heads"]) or not _is_size(kv_heads, LARGEST["kv_heads"]):
        return q_heads, kv_heads
    shares = [gpus for gpus in range(1, q_heads + 1) if not q_heads % gpus and kv_heads % gpus * (gpus % kv_heads) == 0]
    if tp not in shares:
        near = min(shares, key=lambda gpus: abs(gpus - tp))
        heads = f"{q_heads} query heads and {kv_heads} key-value heads"
        raise UserError(f"tp={tp} GPUs cannot share {heads}: set tp={near}")
    return q_heads // tp, max(1, kv_heads // tp)


def _is_size(value: Any, largest: int = _LARGEST_EMBEDDING) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


def packed_lengths(lengths: Any, kv_lengths: Any) -> tuple[Lengths | None, Lengths | None]:
    """Return the queries and the keys of packed sequences; None if there are none, or as many keys as queries.

    Requests are written as in vLLM's attention benchmark (benchmarks/attention_benchmarks): `2q2k` are two of 2,048
    queries, `32q1s1k` are 32 of one query with 1,024 keys, and `_` parts them. Raises UserError if they are neither
    lists nor requests.
    """
    if isinstance(lengths, str):
        if kv_lengths is not None:
            raise UserError(f"lengths={lengths} has the keys of its requests: set kv_lengths=null")
        requests = [request for part in lengths.split("_") for request in _requests(part, lengths)]
        lengths, kv_lengths = (list(own) for own in zip(*requests, strict=True))
        kv_lengths = None if kv_lengths == lengths else kv_lengths
    for name, own in (("lengths", lengths), ("kv_lengths", kv_lengths)):
        if own is not None and not isinstance(own, list | tuple):
            raise UserError(f"{name}={own} is no list: write {name}=[512,1536]")
    return None if lengths is None else tuple(lengths), None if kv_lengths is None else tuple(kv_lengths)


def typed_lengths(lengths: Lengths, kv_lengths: Lengths | None) -> str:
    """Return packed sequences as they may be typed, equal ones behind each other as one word."""
    words = []
    for (queries, keys), equal in itertools.groupby(zip(lengths, kv_lengths or lengths, strict=True)):
        count = len(list(equal))
        words.append(
            (str(count) if count > 1 else "") + f"q{_typed(queries)}" + (f"s{_typed(keys)}" if keys != queries else "")
        )
    return "_".join(words)


def _typed(length: int) -> str:
    return str(length) if length % 1024 or not length else f"{length // 1024}k"


def _requests(typed: str, whole: str) -> list[tuple[int, int]]:
    """Return the queries and the keys of each of some equal requests."""
    match = _REQUESTS.fullmatch(typed)
    if match is None:
        raise UserError(f"lengths={whole} is no batch of requests: write lengths=2q2k_32q1s1k or lengths=[512,1536]")
    count = int(match["count"] or 1)
    if not 1 <= count <= _MOST_REQUESTS:
        raise UserError(f"lengths={whole} has {count} requests: from 1 to {_MOST_REQUESTS:,} are possible")
    queries = int(match["queries"]) * (1024 if match["q_k"] else 1)
    keys = queries if match["keys"] is None else int(match["keys"]) * (1024 if match["s_k"] else 1)
    return [(queries, keys)] * count
