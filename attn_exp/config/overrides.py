"""Overrides as typed: the questions that must be answered before Hydra, which is slow to import, reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

# Earlier names of keys.
RENAMED = {"plots": "save_plots", "tracker.experiment": "tracker.mlflow_experiment"}


def override_key(argument: str) -> str:
    """Return the key that an override sets, adds or deletes: `batch` for `batch=8`, `+batch=8` and `~batch`."""
    return argument.partition("=")[0].lstrip("+~")


def overridden(arguments: Sequence[str], *keys: str) -> bool:
    """Return whether any of the arguments is an override of one of these keys."""
    return any(override_key(argument) in keys for argument in arguments)


def renamed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments with today's names of keys, and a hint for each that had an earlier one."""
    words, hints = [], []
    for argument in arguments:
        key = override_key(argument)
        word = argument.replace(key, RENAMED[key], 1) if key in RENAMED and "=" in argument else argument
        if word != argument:
            hints.append(f"hint: `{word}` is the new spelling of `{argument}`")
        words.append(word)
    return words, hints


def repeated(arguments: Sequence[str]) -> list[str]:
    """Return a hint for each key that is set twice with different values: Hydra takes the last one and says nothing."""
    last: dict[str, str] = {}
    hints: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        key, value = override_key(argument), argument.partition("=")[2]
        if last.setdefault(key, value) != value:
            both = ",".join(dict.fromkeys(f"{last[key]},{value}".split(",")))
            hints[key] = f"hint: {key} is given twice, and {key}={value} counts; for both: -m {key}={both}"
        last[key] = value
    return list(hints.values())


def with_todays_keys(config: Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration with today's names of keys, and a hint for each earlier one.

    Args:
        config: a file of the user's own may have set keys by their earlier names; its values replace the defaults.
        overrides: the command line, with today's names of keys; its values replace those of files.
    """
    changed, hints = dict(config), []
    for earlier, today in RENAMED.items():
        group, _, key = earlier.rpartition(".")
        node = dict(changed.get(group) or {}) if group else changed
        if key in node:
            value = node.pop(key)
            if not overridden(overrides, today):
                node[today.rpartition(".")[2]] = value
            if group:
                changed[group] = node
            hints.append(f"hint: the key `{today}` is the new spelling of `{earlier}`, which a file of yours sets")
    return changed, hints
