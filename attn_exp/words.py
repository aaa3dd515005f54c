"""Words: options of a backend as one would type them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options inside of options under dotted names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def word(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(word, value))}]"
    return str(value)


def told_apart(labels: Sequence[str], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """The labels made unique: where one stands for several sets of (flat) options, what differs stands with it."""
    sets: dict[str, dict[str, Mapping[str, Any]]] = {}
    for label, own in zip(labels, options, strict=True):
        sets.setdefault(label, {}).setdefault(json.dumps(own, sort_keys=True), own)
    several = {label: _differing(list(own.values())) for label, own in sets.items() if len(own) > 1}
    return [
        f"{label}({_typed(own, several[label])})" if label in several else label
        for label, own in zip(labels, options, strict=True)
    ]


def _typed(options: Mapping[str, Any], names: Sequence[str]) -> str:
    return ",".join(f"{name}={word(options.get(name))}" for name in names)


def _differing(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for options in sets for name in options})
    return [name for name in names if len({json.dumps(options.get(name)) for options in sets}) > 1]
