"""Mistakes: Hydra's and OmegaConf's errors as one sentence that says what to type instead."""

import re
from pathlib import Path

from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from attn_exp.conf import conf_folder
from attn_exp.errors import UserError, nearest, no_config_dir


def sentence(error: Exception) -> str:
    """What was typed wrong, and what is right, in one sentence; `error` is a UserError, or Hydra's or OmegaConf's."""
    if isinstance(error, UserError):
        return str(error)
    text = f"{error}" if error.args and str(error) else f"{error.__cause__}"
    if isinstance(error, OverrideParseException):
        # What else its message says of a sweep is told below.
        text = f"Error parsing override '{error.override}'\n{text}"
    for explain in (_no_folder, _unknown_option, _there_already, _unknown_key, _several_values, _sweep, _grammar):
        said = explain(text)
        if said:
            return said
    return " ".join(text.split())


def _no_folder(text: str) -> str | None:
    found = re.search(r"Additional config directory '([^']*)' not found", text)
    return no_config_dir(found[1]) if found else None


def _unknown_option(text: str) -> str | None:
    """`Could not find 'backend/flsh'`, and for a group that may be chosen only with `+`."""
    # Of a list of choices Hydra says that it could not load one, and not which there are.
    found = re.search(r"Could not (?:find|load) '([^']+)/([^/']+)'", text)
    if found:
        group, option = found.groups()
        listed = [line for line in text.splitlines() if line.startswith("\t") and "=" not in line]
        options = [line.strip() for line in listed]
        options = options or sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))
        near = nearest(option, options)
        return f"{group}={option} does not exist: {near}the choices are {', '.join(options)}"
    found = re.search(r"Could not override '([^']+)'\.? ?\s*No match in the defaults list", text)
    if found:
        group = found[1]
        return f"{group} is not chosen by default: write +{group}=..."
    found = re.search(r"Could not find '([^']+)'", text)
    return f"{found[1]} does not exist" if found else None


def _unknown_key(text: str) -> str | None:
    found = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if not found:
        return None
    key = found[1] or found[2]
    if (conf_folder() / key).is_dir():
        several = f", or several in brackets: {key}=[NAME,NAME]" if key == "profiler" else f": {key}=NAME"
        return f"{key} takes the name of a choice{several}"
    if key.startswith("profiler."):
        return _option_of_a_profiler(key)
    if key == "launcher":
        return f"there is no key 'launcher': did you mean 'hydra/launcher=...', one of {', '.join(_launchers())}?"
    launcher = key.startswith("hydra.launcher.")
    if launcher and key in _launcher_keys(conf_folder()):
        return f"there is no key '{key}' without a launcher: choose hydra/launcher={', '.join(_launchers())} first"
    keys = _launcher_keys(conf_folder()) if launcher else _keys(conf_folder())
    near = nearest(key, keys)
    top = sorted(name for name in keys if launcher or "." not in name)
    return f"there is no key '{key}': {near or 'the keys are ' + ', '.join(top)}".rstrip(" ?") + ("?" if near else "")


def _option_of_a_profiler(key: str) -> str:
    """Its options are there only once it is chosen, since several may be."""
    name = key.split(".")[1]
    path = conf_folder() / "profiler" / f"{name}.yaml"
    own = sorted(_flat(path, "") - {"name", "_target_"}) if path.exists() else []
    options = f"; its options are {', '.join(own)}" if own else ""
    return f"there is no key '{key}': options of a profiler come with it, choose profiler={name}{options}"


def _there_already(text: str) -> str | None:
    found = re.search(r"Either remove \+ prefix: '([^']*)'", text)
    return f"that key is there already: write {found[1]} without the +" if found else None


def _several_values(text: str) -> str | None:
    if "Ambiguous value for argument" in text or "requires --multirun" in text:
        return "several values need -m (--multirun): python -m attn_exp -m " + text.split("'")[1]
    return None


def _sweep(text: str) -> str | None:
    if re.search(r"does not support sweep type|Unexpected type annotation.*Sweep", text, re.DOTALL):
        return "a sweep takes a list of values or a range: batch=1,8,16 or batch='range(1,9)'"
    return None


def _grammar(text: str) -> str | None:
    example = "for example backend=flash or batch=1,8,16"
    if "Config group override" in text:
        return f"a group takes the name of a choice, {example}"
    found = re.search(r"Error parsing override '(.*)'\n", text)
    return f"'{found[1]}' is not of the form key=value, {example}" if found else None


def _keys(conf: Path) -> set[str]:
    """All keys that the configuration has: plain ones, groups, and the keys inside of groups."""
    keys = {path.name for path in conf.iterdir() if path.is_dir()}
    keys |= _flat(conf / "config.yaml", "")
    for path in conf.glob("*/*.yaml"):
        if path.parent.name != "experiment":
            keys |= _flat(path, f"{path.parent.name}.")
    return {key for key in keys if not key.startswith(("hydra", "defaults"))}


def _launchers() -> list[str]:
    return sorted(path.stem for path in (conf_folder() / "hydra" / "launcher").glob("*.yaml"))


def _launcher_keys(conf: Path) -> set[str]:
    return {key for path in conf.glob("hydra/launcher/*.yaml") for key in _flat(path, "hydra.launcher.")}


def _flat(path: Path, prefix: str) -> set[str]:
    loaded = OmegaConf.load(path)
    found: set[str] = set()
    if isinstance(loaded, DictConfig):
        for key, value in loaded.items_ex(resolve=False):
            found.add(f"{prefix}{key!s}")
            if isinstance(value, DictConfig):
                found |= {f"{prefix}{key!s}.{inner!s}" for inner in value}
    return found
