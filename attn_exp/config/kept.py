"""The parts of a configuration that a record keeps: no secrets, and values from the environment by name."""

import re
from collections.abc import Mapping
from typing import Any

from attn_exp.core.errors import UserError
from attn_exp.core.redaction import held_secret
from attn_exp.core.text import flat

# Not kept in the record: where results go does not describe the job, and a tracking URI may hold a password.
_NOT_KEPT = (
    "tracker",
    "folder",
    "dry_run",
    "save_plots",
    "columns",
    "show",
    "format",
    "quiet",
    "private",
    "gpu_wait_s",
)
# A worker needs the values of these.
_BY_VALUE = ("backend", "compile", "profiler", "timer")


def kept_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of a resolved configuration: text from environment variables as `${oc.env:NAME}`.

    Raises UserError if an option is a secret, or comes from the environment and could not be kept by name.
    """
    kept = {key: value for key, value in config.items() if key not in (*_NOT_KEPT, "from_environment")}
    values = {key: str(value) for key, value in flat(kept).items()}
    if (name := held_secret(values.values())) is not None:
        key = next(key for key, value in values.items() if held_secret([value]))
        raise UserError(
            f"{key} holds the value of the variable {name}, and would be kept in the record: let the backend read the "
            f"variable itself, with isolation.variables=[{name}]"
        )
    for key, written in config.get("from_environment", {}).items():
        kept = _by_name(kept, key, written)
    return kept


def _by_name(kept: Mapping[str, Any], key: str, written: Any) -> dict[str, Any]:
    """Return the kept configuration with the text of one key as it was written."""
    changed = group = {**kept}
    *parents, last = key.split(".")
    for name in parents:
        if not isinstance(group.get(name), dict):
            return changed
        group[name] = group = {**group[name]}
    value = group.get(last)
    if not any(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
        return changed
    if key.partition(".")[0] in _BY_VALUE:
        name = (re.findall(r"oc\.env:\s*(\w+)", str(written)) or ["NAME"])[0]
        raise UserError(
            f"{key} comes from the environment ({written}), and would be kept in the record: let the backend read the "
            f"variable itself, with isolation.variables=[{name}]"
        )
    if isinstance(value, str):
        group[last] = written
    return changed
