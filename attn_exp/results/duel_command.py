"""Duel commands: how to decide what two separate measurements leave open."""

import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from attn_exp.core.case.case import GIVEN, NORMAL, PASSES, TYPED_DTYPES, Case
from attn_exp.core.case.fields import typed_fields
from attn_exp.core.conf import choice
from attn_exp.core.record.request import Compile
from attn_exp.core.source import foreign_classes
from attn_exp.core.text import flat, word
from attn_exp.results.cell import Cell
from attn_exp.results.result import Result

# Sizes that a model defines; all other fields of a case are keys of their own.
_OF_MODEL = ("q_heads", "kv_heads", "head_dim", "value_dim")
# Words that neither a shell nor Hydra interprets.
_PLAIN = re.compile(r"[\w.+~/:@=\[\]{}, -]*", re.ASCII)
_SHOWN = 40
_DEFAULT_TIMER = {"cuda": "device", "cpu": "cpu"}


@dataclass(frozen=True, slots=True)
class Duel:
    """Two cells of one case whose order is undecided, and the command of the duel that would decide it."""

    a: Cell
    b: Cell
    command: str


def duels(pairs: Sequence[tuple[Cell, Cell]]) -> tuple[Duel, ...]:
    """Return the duels of pairs of cells of one case and pass; both passes share one command."""
    passes: dict[Any, set[str]] = defaultdict(set)
    for a, b in pairs:
        passes[frozenset((a.result.key, b.result.key))].add(a.direction)
    return tuple(
        Duel(a, b, duel_command(a.result, b.result, passes[frozenset((a.result.key, b.result.key))])) for a, b in pairs
    )


def duel_command(a: Result, b: Result, passes: Collection[str]) -> str:
    """Return the command that measures two backends side by side on the case of `a`, which is that of `b`.

    It is a shell comment if a duel cannot do that, or if it would import a class that a record names, or has words that
    Hydra interprets: a record may be somebody else's, and users paste the printed command.
    """
    if a.caches != b.caches:
        return _comment(f"{a.label} and {b.label} differ in caches=, which a duel sets for all its backends")
    if a.measuring.inputs == GIVEN:
        return _comment(f"{a.label} and {b.label} are your own functions: attn_exp.assert_not_slower measures both")
    words = ["attn-exp", "duel", *_rival("a", a), *_rival("b", b), *case_words(a.case, a.model)]
    if set(passes) == {"forward"}:
        # The backward needs its forward.
        words.append("passes=[forward]")
    elif "step" in passes:
        words.append(f"passes=[{','.join(name for name in PASSES if name in passes)}]")
    # A CPU cannot settle a tie that a GPU left open.
    words.append(f"device={a.device}")
    usual = {"timer": _DEFAULT_TIMER.get(a.device), "regime": "sustained", "inputs": NORMAL, "accumulate": False}
    usual |= {"gold": "float32"} | ({"l2": "cold"} if a.device == "cuda" else {})
    ways = {name: getattr(a.measuring, name) for name in usual}
    words += [f"{name}={word(value)}" for name, value in ways.items() if value != usual[name]]
    if not a.caches:
        words.append("caches=false")
    if a.compile == b.compile:
        words += _compile_words(a.compile, added="++")
    else:
        words += [f"a.{word}" for word in _compile_words(a.compile)]
        words += [f"b.{word}" for word in _compile_words(b.compile)]
    odd = next((one for one in words if not _PLAIN.fullmatch(one)), None)
    if odd is not None:
        return _comment(f"{a.label} and {b.label}: no command, since {odd[:_SHOWN]!r} of a record is no plain word")
    foreign = dict.fromkeys(foreign_classes(a.backend) + foreign_classes(b.backend))
    if foreign:
        return _comment(f"if you trust the class {' and '.join(foreign)} of the record: {shlex.join(words)}")
    return shlex.join(words)


def _comment(text: str) -> str:
    """Return the text as a shell comment of one line."""
    return f"# {' '.join(text.split())}"


def _compile_words(compiled: Compile, added: str = "") -> list[str]:
    """Return the overrides that compose to `compiled`; `added` is the prefix of keys that the configuration lacks."""
    if compiled.mode == "none":
        return []
    more = [f"{added}compile.options.{name}={word(value)}" for name, value in flat(compiled.options).items()]
    named = [f"compile.name={word(compiled.name)}"] if compiled.name else []
    return [f"compile={compiled.mode}", *named, *(["compile.fullgraph=true"] if compiled.fullgraph else []), *more]


def case_words(case: Case, model: str) -> list[str]:
    """Return the overrides that compose to a case: its model's name if that defines its sizes, else the sizes."""
    # A model may bring a mask, a softcap or sinks, which the case is perhaps without. The width of a block's MLP is no
    # part of other cases.
    words, own = [f"dtype={TYPED_DTYPES[case.dtype]}"], {**choice("model", model), "mlp_dim": None}
    if _sizes(own) == {name: getattr(case, name) for name in _OF_MODEL}:
        words.append(f"model={model}")
    else:
        # Relative to the default model, whose value_dim follows head_dim and which has no embedding.
        names = _OF_MODEL[:3] if case.value_dim == case.head_dim else _OF_MODEL
        words += [f"model.{name}={getattr(case, name)}" for name in names]
        own = {}
    typed = typed_fields(case, square=False)
    for field in fields(Case):
        value = typed[field.name]
        # The configuration's default of `causal` differs from the dataclass's.
        usual = own.get(field.name, field.default) or None
        given = field.default is MISSING or value != usual or field.name == "causal"
        if field.name in (*_OF_MODEL, "dtype", "q_len", "kv_len") or not given:
            continue
        words.append(f"{field.name}={word(value)}")
    return [*words, *([f"seq_len={case.q_len}"] if case.square else [f"q_len={case.q_len}", f"kv_len={case.kv_len}"])]


def _rival(letter: str, result: Result) -> list[str]:
    """One rival's backend and those of its options that its YAML does not bring."""
    name = str(result.backend.get("name"))
    own = choice("backend", name)
    known = flat(own or choice("backend", "eager"))
    changed = {key: value for key, value in flat(result.backend).items() if known.get(key, MISSING) != value}
    options = [f"{letter}.{key}={word(value)}" for key, value in changed.items()]
    return [f"{letter}={name if own else 'eager'}", *options]


def _sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    q_heads, embedding = model.get("q_heads"), model.get("embedding")
    head_dim = model.get("head_dim") or (embedding // q_heads if embedding and q_heads else None)
    kv_heads, value_dim = model.get("kv_heads") or q_heads, model.get("value_dim") or head_dim
    return {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
