"""How far cases are apart, and in which respect one lies beyond others."""

import math
from collections.abc import Callable, Collection
from typing import Any

from attn_exp.core.case.case import INT8, LAYOUTS, Case
from attn_exp.core.case.features import FEATURES
from attn_exp.core.case.flops import unmasked_pairs
from attn_exp.core.case.masks import KINDS, Numbered

# The distance that one property (a mask, a layout) adds, in octaves of sizes.
_PROPERTY = 1.5
# Kernels compute tiles of so many queries or keys, of which the last takes as long as the others.
_TILE = 128

# The sizes whose logarithms matter. A GPU works on batch x heads side by side.
SIZES: dict[str, Callable[[Case], float]] = {
    "q_len": lambda case: case.q_len,
    "kv_len": lambda case: case.kv_len,
    "batch x q_heads": lambda case: case.batch * case.q_heads,
    "head_dim": lambda case: case.head_dim,
    "value_dim": lambda case: case.value_dim,
    "q_heads / kv_heads": lambda case: case.q_heads / case.kv_heads,
}


def kind_of(case: Case) -> dict[str, Any]:
    """Return the properties of a case between which nothing can be interpolated."""
    mask = "full" if case.dense else "causal" if case.causal else "packed"
    return {
        "dtype": case.dtype,
        "mask": " ".join([mask, *(name for name in KINDS if not case.dense and getattr(case, name))]),
        "sequences": "packed" if case.lengths is not None else "padded",
        **{
            field: getattr(case, field) is not None if feature.interpolated else getattr(case, field)
            for field, feature in FEATURES.items()
            if field not in ("lengths", "kv_lengths")
        },
        "workload": case.workload or "attention",
    }


def beyond(case: Case, cases: Collection[Case]) -> tuple[str, ...]:
    """Return in which respect a case lies beyond all of `cases`, as `kv_len 65536 (measured up to 16384)`."""
    said = []
    for name, get in SIZES.items():
        value, measured = get(case), {get(one) for one in cases}
        if not min(measured) <= value <= max(measured):
            limit = f"up to {max(measured):g}" if value > max(measured) else f"from {min(measured):g}"
            said.append(f"{name} {value:g} (measured {limit})")
    kinds = [kind_of(one) for one in cases]
    said += [f"{name} {value}" for name, value in kind_of(case).items() if all(kind[name] != value for kind in kinds)]
    return tuple(said)


def distance(one: Case, other: Case) -> float:
    """Return how far two cases of one kind are apart: octaves of their sizes, as a Euclidean distance.

    Lengths above 128 are rounded up to tiles of 128: 264 counts as 384.
    """
    return math.dist(_point(one), _point(other))


def _tiled(length: int) -> int:
    return length if length <= _TILE else math.ceil(length / _TILE) * _TILE


def _point(case: Case) -> list[float]:
    values = {name: get(case) for name, get in SIZES.items()}
    values |= {"q_len": _tiled(case.q_len), "kv_len": _tiled(case.kv_len)}
    sizes = [math.log2(value) for value in values.values()]
    pairs = max(1, unmasked_pairs(case))
    kind = kind_of(case)
    properties = (
        case.dtype == "float16",
        case.dtype == "float32",
        case.quantised,
        case.dtype == INT8,
        kind["mask"] != "full",
        isinstance(case.mask, Numbered),
        case.lengths is not None,
        case.softcap is not None,
        case.layout != LAYOUTS[0],
        case.workload is not None,
    )
    return [*sizes, math.log2(pairs / (case.q_len * case.kv_len)), *(_PROPERTY * one for one in properties)]
