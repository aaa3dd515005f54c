"""Explain the mistakes that Hydra finds, and find those that it accepts: keys that nothing reads.

Hydra refuses an unknown key, but not one with a `+` before it, nor one in a file of the user's own.
"""

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.errors import UserError, first_line, nearest

# Letters of a library's message that no sentence of ours explains.
_LONGEST = 300
# Between these and the library that raised there is no code of a job's.
_COMPOSING = ("attn_exp.config.hydra_main", "attn_exp.config.compose", "attn_exp.sweep.product")


def explain_error(error: Exception) -> str:
    """Return one sentence that says what is wrong and what to type instead."""
    if isinstance(error, UserError):
        return str(error)
    # Not at the top: `--help` of most commands needs no Hydra.
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, is no YAML: {error.problem or error.context}"
    text = f"{error}" if error.args and str(error) else f"{error.__cause__ or ''}"
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return f"Hydra cannot compose these overrides ({type(error).__name__}: {first_line(error)})"
    if isinstance(error, OverrideParseException):
        text = f"Error parsing override '{error.override}'\n{text}"
    if word := _with_several_values(text):
        return f"several values need -m (--multirun): python -m attn_exp -m {shlex.quote(word)}"
    for explain in (_unknown_option, _unknown_key, _grammar):
        if sentence := explain(text):
            return sentence
    return " ".join(text.split())[:_LONGEST]


def is_of_composing(error: Exception) -> bool:
    """Whether an exception says that the overrides cannot be composed: one of Hydra's and OmegaConf's own kinds.

    Another exception (a TypeError for `profiler=[1]`) counts if they raise it within, called by the modules that
    compose, and not by a job.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, UserError):
        return False
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    ours, library, trace = "", False, error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("attn_exp."):
            ours, library = module, False
        library = library or module.split(".")[0] in ("hydra", "omegaconf")
        trace = trace.tb_next
    return library and ours in _COMPOSING


def _unknown_option(text: str) -> str | None:
    """Explain an option that does not exist, and a group that can be chosen only with `+`."""
    # For a list of choices Hydra says that it could not load one, but not which ones exist.
    match = re.search(r"Could not (?:find|load) '([^']+)/([^/']*)'", text)
    if match:
        group, option = match.groups()
        listed = [line for line in text.splitlines() if line.startswith("\t") and "=" not in line]
        options = [line.strip() for line in listed]
        options = options or sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))
        if (group, option) == ("hydra/sweeper", "optuna"):
            return "hydra/sweeper=optuna needs hydra-optuna-sweeper: pip install 'attn_exp[optuna]'"
        near = nearest(option, options)
        return f"{group}={option} does not exist: {near}the choices are {', '.join(options)}"
    match = re.search(r"Could not override '([^']+)'\.? ?\s*No match in the defaults list", text)
    if match:
        group = match[1]
        return f"{group} is not chosen by default: write +{group}=..."
    match = re.search(r"Could not find '([^']+)'", text)
    return f"{match[1]} does not exist" if match else None


# The names of other benchmarks and of PyTorch; nothing here is called alike.
_ROUNDS = "write stopping=quick or stopping=thorough, or stopping.min_rounds=5"
_OWN = "attention with one is a function of your own: attn_exp.time(function, q, k, v, reference=...)"
_MEANT = {"iters": _ROUNDS, "warmup": _ROUNDS, "attn_mask": _OWN, "dropout": _OWN}


def _unknown_key(text: str) -> str | None:
    match = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if not match:
        return None
    key = match[1] or match[2]
    if (conf_folder() / key).is_dir():
        several = f", or several in brackets: {key}=[NAME,NAME]" if key == "profiler" else f": {key}=NAME"
        return f"{key} takes the name of a choice{several}"
    if key.startswith("profiler."):
        return f"there is no key '{key}': options of a profiler come with it, choose profiler={key.split('.')[1]}"
    launcher = key.startswith("hydra.launcher.")
    if launcher and key in _launcher_keys():
        return f"there is no key '{key}' without a launcher: choose hydra/launcher=NAME first"
    keys = _launcher_keys() if launcher else _keys()
    if key in keys:
        return f"the chosen {key.partition('.')[0]} has no key '{key}': write +{key}=VALUE to add it"
    group, dot, option = key.partition(".")
    if group == "backend" and dot:
        return f"the chosen backend has no key '{key}': if its class takes {option}, write ++{key}=VALUE to add it"
    if key in _MEANT:
        return f"there is no key '{key}': {_MEANT[key]}"
    near = nearest(key, keys)
    # `heads` means model.q_heads, of whose letters it has too few.
    for whole in sorted(keys, key=len) if not near else ():
        near = near or (nearest(key, [whole.rpartition(".")[2]]) and f"did you mean '{whole}'? ")
    top = sorted(name for name in keys if launcher or "." not in name)
    return f"there is no key '{key}': {near or 'the keys are ' + ', '.join(top)}".rstrip(" ?") + ("?" if near else "")


def _with_several_values(text: str) -> str | None:
    several = "Ambiguous value for argument" in text or "requires --multirun" in text
    return text.split("'")[1] if several else None


def explain_error_of_one_case(error: Exception) -> str:
    """Return the sentence of `explain_error` for a command that takes one case, and so one value of each key."""
    word = _with_several_values(str(error))
    key = word.partition("=")[0].lstrip("+") if word else None
    return f"this command takes one case: give {key} one value" if key else explain_error(error)


def _grammar(text: str) -> str | None:
    match = re.search(r"Error parsing override '(.*)'\n", text)
    if not match:
        return None
    key = re.match(r"[+~]*([A-Za-z_][\w./@-]*)=", match[1])
    if key:
        return f"the value of {key[1]} cannot be read: write batch=1,8 or batch='range(1,9)'"
    if re.fullmatch(r"[\w-]+", match[1]):
        return f"'{match[1]}' is neither a command nor key=value: attn-exp --help lists the commands"
    return f"'{match[1]}' is not of the form key=value, for example backend=flash or batch=1,8,16"


def _keys() -> set[str]:
    """Return all keys of the configuration: single ones, groups, and the keys in groups."""
    conf = conf_folder()
    keys = {path.name for path in conf.iterdir() if path.is_dir()}
    keys |= _flat(conf / "config.yaml", "")
    for path in conf.glob("*/*.yaml"):
        if path.parent.name != "experiment":
            keys |= _flat(path, f"{path.parent.name}.")
    return {key for key in keys if not key.startswith(("hydra", "defaults"))}


def _launcher_keys() -> set[str]:
    return {key for path in conf_folder().glob("hydra/launcher/*.yaml") for key in _flat(path, "hydra.launcher.")}


def _flat(path: Path, prefix: str) -> set[str]:
    keys: set[str] = set()
    for key, value in read_yaml(path).items():
        keys.add(f"{prefix}{key}")
        # The inner keys of `about` describe a backend; nobody sets them on a command line.
        if isinstance(value, dict) and key != "about":
            keys |= {f"{prefix}{key}.{inner}" for inner in value}
    return keys


# Groups that accept only the keys of our own files. A backend, a profiler and a launcher check theirs themselves.
_CLOSED = ("model", "dtype", "inputs", "compile", "timer", "tracker", "isolation", "stopping")


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise UserError for a key that is not declared and that no `${...}` in the configuration refers to.

    `config` is the whole configuration as an unresolved dictionary, without its `hydra` node.
    """
    for group in (*_CLOSED, "backend"):
        if isinstance(config.get(group), list):
            raise UserError(f"the chosen {group} is a list: each line of its file has the form key: value")
    known = declared_keys()
    given = [str(key) for key in config]
    for group in _CLOSED:
        node = config.get(group)
        given += [f"{group}.{key}" for key in node] if isinstance(node, Mapping) else []
    unknown = [key for key in given if key not in known]
    if not unknown:
        return
    references = [text for text in _texts(config) if "${" in text]
    for key in unknown:
        name = re.escape(key.rpartition(".")[2])
        if not any(re.search(rf"\$\{{.*(?<!\w){name}(?!\w)", text) for text in references):
            raise UserError(_undeclared(key, known))


def _undeclared(key: str, known: frozenset[str]) -> str:
    if key == "experiment":
        return "an experiment's file has to begin with the line # @package _global_, else none of its keys is set"
    node, dot, name = key.rpartition(".")
    there = sorted(one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == node)
    near = nearest(name, there) or (f"the keys of {node} are {', '.join(there)}; " if dot else "")
    return f"there is no key '{key}': {near}one of your own has to be used by another, as in seed='${{{key}}}'"


@functools.cache
def declared_keys() -> frozenset[str]:
    """Return the keys of the configuration, its groups, and the keys of the groups in `_CLOSED`."""
    keys = _keys() - {"experiment"}
    return frozenset(key for key in keys if "." not in key or key.partition(".")[0] in _CLOSED)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
