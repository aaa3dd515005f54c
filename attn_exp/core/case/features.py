"""What a case may have beside its mask: scores, caches and packed sequences.

A kind is the field of a case with its value, and a row here. The check of the value, labels, and what backends and
blocks refuse follow from the row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Whether a bias has numbers of its own for each query head.
BIASES = ("heads", "shared")
# Keys of a page, and the orders of pages, the usual one first.
LARGEST_PAGE = 256
PAGES = ("shuffled", "linear", "shared")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One field of a case.

    Attributes:
        name: what a backend that has it declares; None if it needs no code of its own.
        lacking: what a backend or a block without it has not.
        unset: what to set instead.
        label: what labels call it, with `{}` for the value; empty if they do not.
        allows: whether a value that is not `absent` is valid.
        wrong: what another value is.
        absent: the value of a case without it.
        interpolated: whether a time between those of two values says something.
    """

    name: str | None
    lacking: str
    unset: str
    label: str = ""
    allows: Callable[[Any], bool] = lambda value: True
    wrong: str = ""
    absent: Any = None
    interpolated: bool = False

    def has_not(self) -> str:
        """Return the end of a refusal, which says what to set instead."""
        return f"has no {self.lacking}: set {self.unset}"


def _switch(name: str, lacking: str) -> Feature:
    return Feature(
        name=name, lacking=lacking, unset=f"{name}=false", label=name,
        allows=lambda value: value is True, wrong="neither true nor false", absent=False,
    )  # fmt: skip


def _choice(choices: tuple[str, ...], wrong: str = "", **about: Any) -> Feature:
    return Feature(allows=lambda value: value in choices, wrong=wrong or f"not one of {', '.join(choices)}", **about)


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


# By the field of a case.
FEATURES = {
    "softcap": Feature(
        name="softcap", lacking="softcap", unset="softcap=null", label="cap{:g}", interpolated=True,
        allows=lambda cap: _is_number(cap, (int, float)) and 0 < cap < 1e6,
        wrong="not a positive number; null is no softcap",
    ),
    "sink": _switch("sink", "sinks"),
    "alibi": _switch("alibi", "ALiBi"),
    "bias": _choice(
        BIASES, f"not one of {', '.join(BIASES)}; null is no bias",
        name="bias", lacking="bias", unset="bias=null", label="bias {}",
    ),
    "latent": _switch("latent", "latent values"),
    "lengths": Feature(name="packed", lacking="packed sequences", unset="lengths=null"),
    "kv_lengths": Feature(
        name="ragged", lacking="packed sequences with more keys than queries", unset="kv_lengths=null"
    ),
    "empty_requests": Feature(
        name="empty_requests", lacking="packed sequences without a query", unset="lengths of 1 or more"
    ),
    "page_size": Feature(
        name="paged", lacking="paged cache", unset="cache=contiguous", label="page{}",
        allows=lambda keys: _is_number(keys, int) and 1 <= keys <= LARGEST_PAGE,
        wrong=f"not a whole number of keys from 1 to {LARGEST_PAGE}; null is no pages",
    ),
    "pages": _choice(PAGES, name=None, lacking="order of pages", unset="pages=null", label="{}"),
    "cache_dtype": _choice(
        ("fp8",), "neither auto nor fp8",
        name="fp8_cache", lacking="fp8 cache", unset="cache_dtype=auto", label="{} cache",
    ),
}  # fmt: skip
# The names that backends declare.
EVERY_FEATURE = tuple(feature.name for feature in FEATURES.values() if feature.name is not None)
# Features that a case has or lacks, without a value.
SWITCHES = tuple(field for field, feature in FEATURES.items() if feature.absent is False)
# Which fields do not go together: a case with the first has none of the others. `quantised` is its dtype.
APART = {
    "bias": ("lengths",),
    "latent": ("quantised",),
    "page_size": ("quantised",),
    "workload": ("lengths", "sink", "alibi", "bias", "latent", "page_size", "quantised"),
}
