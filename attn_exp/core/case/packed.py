"""The lengths of packed sequences as they are typed: a list, or a batch of requests in few characters."""

import itertools
import re
from typing import Any

from attn_exp.core.errors import UserError

Lengths = tuple[int, ...]

_REQUESTS = re.compile(
    r"(?P<count>[0-9]{1,6})?q(?P<queries>[0-9]{1,9})(?P<q_k>k)?(?:s(?P<keys>[0-9]{1,9})(?P<s_k>k)?)?"
)
_MOST_REQUESTS = 1 << 16


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
    return str(length) if length % 1024 else f"{length // 1024}k"


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
    if not queries or not keys:
        raise UserError(f"lengths={whole} has a request without a {'key' if queries else 'query'}")
    return [(queries, keys)] * count
