"""Choice: the profilers that a configuration asks for, checked in the parent before anything starts."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.case import PASSES
from attn_exp.conf import conf_folder
from attn_exp.errors import UserError

# What a value has to be that stands for one of such a type in a profiler's YAML.
_KINDS = {bool: "neither true nor false", int: "not a whole number from 1 on", list: "not a list: write [...]"}


def chosen_profilers(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The options of each profiler under `profiler`, its `name` and `_target_` among them; none by default.

    Raises:
        UserError: a profiler without a class, or with a name that its files could not lie under.
    """
    # None of them: Hydra leaves the key out for `profiler=[]`.
    found = config.get("profiler") or {}
    if not isinstance(found, dict):
        raise UserError(f"profiler={found} is no choice of profilers: write profiler=torch or profiler=[proton,torch]")
    if "_target_" in found:
        name = found.get("name", "NAME")
        raise UserError(f"a profiler of your own begins with the line '# @package profiler.{name}': add it to its YAML")
    checked = [_checked(str(name), options) for name, options in found.items()]
    # It joins what others found in this job, so it comes after them however they were typed.
    return tuple(sorted(checked, key=lambda options: options["name"] == "inductor"))


def size_limit_mb(config: dict[str, Any]) -> float:
    """The largest file that a profiler may leave, in units of 10^6 bytes.

    Raises:
        UserError: it is no positive number.
    """
    limit = config["profiler_limit_mb"]
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0:
        raise UserError(f"profiler_limit_mb={limit} is not a positive number of megabytes")
    return float(limit)


def _checked(name: str, options: Any) -> dict[str, Any]:
    target = options.get("_target_") if isinstance(options, dict) else None
    if not isinstance(target, str) or not target:
        raise UserError(f"profiler.{name} has no class: choose profiler={name}, or set +profiler.{name}._target_=...")
    if not name.isidentifier() or name in PASSES:
        raise UserError(f"profiler.{name} cannot be the name of a profiler: use letters, digits and '_'")
    for key, default in _defaults(conf_folder() / "profiler" / f"{name}.yaml", target).items():
        value, kind = options.get(key), type(default)
        right = type(value) is kind and (kind is not int or value > 0)
        if kind in _KINDS and not right:
            raise UserError(f"profiler.{name}.{key}={value} is {_KINDS[kind]}; it is {default} by default")
    return {**options, "name": name}


@cache
def _defaults(path: Path, target: str) -> dict[str, Any]:
    """What stands in the profiler's own YAML; nothing for a profiler of somebody else's, or of another class."""
    found: dict[str, Any] = msgspec.yaml.decode(path.read_bytes()) if path.exists() else {}
    return found if found.get("_target_") == target else {}
