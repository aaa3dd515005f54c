"""Keys: whether a composed configuration has any that nothing reads.

Hydra refuses an unknown key, but not one with a `+` before it, nor one in a file of the user's own.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.conf import conf_folder
from attn_exp.errors import UserError, nearest

# Nodes that take the keys of our own files and no others. A backend, a profiler and a launcher check their own.
_CLOSED = ("model", "dtype", "compile", "timer", "tracker", "isolation", "stopping")


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise UserError for a key that neither the configuration declares nor any `${...}` in it refers to.

    Args:
        config: the whole configuration as a dictionary, not resolved, without its `hydra` node.
    """
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
            raise UserError(_sentence(key, known))


def _sentence(key: str, known: frozenset[str]) -> str:
    if key == "experiment":
        return "an experiment's file has to begin with the line # @package _global_, else none of its keys is set"
    node, dot, name = key.rpartition(".")
    there = sorted(one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == node)
    near = nearest(name, there) or f"the keys{dot and ' of '}{node} are {', '.join(there)}; "
    return f"there is no key '{key}': {near}one of your own has to be used by another, as in batch='${{{key}}}'"


@functools.cache
def declared_keys() -> frozenset[str]:
    """Keys of the configuration and its groups, and those within the groups that take no others."""
    conf = conf_folder()
    top = _load(conf / "config.yaml")
    found = {str(key) for key in top} | {path.name for path in conf.iterdir() if path.is_dir()}
    found -= {"defaults", "hydra", "experiment"}
    for group in _CLOSED:
        nodes = [top.get(group, {}), *(_load(path) for path in (conf / group).glob("*.yaml"))]
        found |= {f"{group}.{key}" for node in nodes for key in node}
    return frozenset(found)


def _load(path: Path) -> dict[str, Any]:
    # By libyaml, where it is: ten times as fast, and some forty files are read at every start.
    found: dict[str, Any] = msgspec.yaml.decode(path.read_bytes()) or {}
    return found


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
