"""Mutations: good input with something changed, in its structure or in its bytes, for tests that nothing breaks."""

import copy
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("ATTN_EXP_FUZZ", "0"))


def mutated(few: int = 100, share: float = 1.0) -> settings:
    """Settings of a test of mutations: as many examples as `make fuzz` asks for, else these few, each time the same.

    `share` of what `make fuzz` asks for is tried where an example takes long.
    """
    # Nothing may hang: ten seconds for one input are a hundred times what the slowest takes.
    return settings(
        max_examples=round(EXAMPLES * share) or few,
        derandomize=not EXAMPLES,
        database=None,
        deadline=10_000,
        suppress_health_check=list(HealthCheck),
    )


Made = TypeVar("Made")


def attempt(work: Callable[[], Made], *refusals: type[Exception]) -> tuple[Made | None, str | None]:
    """Return what `work` returns, and None; or None, and the sentence of a refusal of these kinds. Others pass."""
    try:
        return work(), None
    except refusals as refusal:
        return None, str(refusal)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30]),
    st.sampled_from([0.0, -0.0, -1.5, 1e-320, 5e-324, 1e308, 1e18, 0.1]),
    st.sampled_from(["", "ok", "x" * 300, "../../x", "/etc/passwd", "a\nb", "\x00", "é", "\u202e", "${seed}", "nan"]),
    st.sampled_from(
        ["9" * 5000, "0-99999999999", "1,,2", "-", "forward", "cpu", "$x_1$", "[x](y)", "<svg>", "A" * 50_000]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], [None], {"": None}, {"name": []}, [1, "a"], {"a": {"b": {"c": 1}}}]),
    st.sampled_from([{"x" * 300: 1.0}, {"forward/time_us": 5e-324}, list(range(50)), [1e308, 1e308], [0.0]]),
).map(copy.deepcopy)  # the lists among them are changed later
# What JSON and YAML know besides what `json.dumps` writes.
_TOKENS = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1e-999", b"9" * 400, b"null", b"true", b"{}", b"[]"),
    *(b'"\\ud800"', b"\xff", b"\x00", b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000, b"!!python/object:os.system"),
    *(b"&a [*a]", b"*a", b"---\n", b"? ", b": ", b"!!binary x", b"\t", b'"', b"'", b",", b"}", b"]"),
)


def paths(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a tree of dictionaries and lists."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here, *(path for key, value in inner for path in paths(value, (*here, key)))]


@st.composite
def trees(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with one to four changes: something gone, odd, of another kind, doubled, or exchanged."""
    changed = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 4))):
        found = paths(changed)[1:]
        if not found:
            return draw(ODD)
        path = draw(st.sampled_from(found))
        owner = changed
        for key in path[:-1]:
            owner = owner[key]
        match draw(st.sampled_from(["odd", "odd", "gone", "other", "new", "kind"])):
            case "odd":
                owner[path[-1]] = draw(ODD)
            case "gone":
                del owner[path[-1]]
            case "other":
                other = changed
                for key in draw(st.sampled_from(found)):
                    other = other[key] if isinstance(other, (dict, list)) and _has(other, key) else other
                owner[path[-1]] = copy.deepcopy(other)
            case "new":
                if isinstance(owner, dict):
                    owner[draw(st.text(max_size=6) | st.sampled_from(["forward", "backward", "name", "x/time_us"]))] = (
                        draw(ODD)
                    )
                else:
                    owner.append(draw(ODD))
            case "kind":
                value = owner[path[-1]]
                owner[path[-1]] = draw(st.sampled_from([str(value), [value], {"x": value}]))
    return changed


@st.composite
def contents(draw: st.DrawFn, tree: Any, whole: bytes) -> bytes:
    """A file with a changed tree, or with changed bytes, or with both."""
    content = whole
    if draw(st.booleans()):
        content = json.dumps(draw(trees(tree))).encode()
        if draw(st.booleans()):
            return content
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["cut", "flip", "insert", "drop", "token", "double"])):
            case "cut":
                content = content[:at]
            case "flip":
                content = content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
            case "insert":
                content = content[:at] + draw(st.binary(max_size=6)) + content[at:]
            case "drop":
                content = content[:at] + content[at + draw(st.integers(1, 40)) :]
            case "token":
                content = content[:at] + draw(st.sampled_from(_TOKENS)) + content[at:]
            case "double":
                length = draw(st.integers(1, 200))
                content = content[:at] + content[at : at + length] + content[at:]
    return content


@st.composite
def texts(draw: st.DrawFn, good: list[str], words: list[str]) -> str:
    """One of the good texts with one to four changes: words and characters gone, put in, or exchanged."""
    text = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["cut", "drop", "word", "character", "double", "swap"])):
            case "cut":
                text = text[:at] if draw(st.booleans()) else text[at:]
            case "drop":
                text = text[:at] + text[at + draw(st.integers(1, 6)) :]
            case "word":
                text = text[:at] + draw(st.sampled_from(words)) + text[at:]
            case "character":
                text = text[:at] + draw(st.characters(exclude_categories=["Cs"])) + text[at:]
            case "double":
                length = draw(st.integers(1, 30))
                text = text[:at] + text[at : at + length] * draw(st.integers(1, 3)) + text[at:]
            case "swap":
                text = text[at:] + text[:at]
    return text


def _has(owner: Any, key: Any) -> bool:
    return key in owner if isinstance(owner, dict) else isinstance(key, int) and 0 <= key < len(owner)
