"""Compose and resolve configurations, and read what several commands need of them."""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attn_exp.config.check import check_keys
from attn_exp.config.overrides import no_gpu, overridden, override_key
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.text import flat

# A list of the tokens that a library's parser expected takes a line of its own.
_LONGEST_REASON = 100
# A value that names several: `1,8` and `range(1,9)`, and not `[1,8]`.
_SEVERAL = re.compile(r"(range|glob|choice)\(|[^\[{('\"]*,")
_LONGEST_VARIED = 40


def resolved_config(config: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a composed configuration as a dictionary without `${...}` and without Hydra's node.

    If it has values of environment variables, `from_environment` has how those were written, by dotted key. Raises
    UserError if an interpolation cannot be resolved, nothing reads a key, or two that were typed disagree.
    """
    names = [str(name) for name in config if name != "hydra"]
    # Only where it is needed: a masked copy takes longer than everything else here.
    own = OmegaConf.masked_copy(config, names) if "hydra" in config else config
    written = dictionary(own, resolve=False)
    check_keys(written)
    try:
        named = dictionary(own, resolve=True)
    except OmegaConfBaseException as error:
        key, why = error.full_key or "a key", str(error).splitlines()[0][:_LONGEST_REASON]
        raise UserError(f"what {key} refers to by ${{...}} cannot be found or read ({why})") from error
    for key in ("sweep", "folder"):
        if isinstance(name := named.get(key), int) and not isinstance(name, bool):
            # Hydra reads sweep=2026 as a number.
            named[key] = str(name)
    if not isinstance(name := named.get("sweep", ""), str):
        # The text is no longer known: 2026.10 is 2026.1 by now.
        raise UserError(f"sweep={name} is not read as a name: write it in quotes, sweep='\"NAME\"'")
    if not isinstance(folder := named.get("folder", "of a sweep"), str) or not folder:
        raise UserError(f"folder={'' if folder is None else folder} names no folder: leave it out, or name one")
    model, width = named.get("model"), named.get("embed_dim")
    if width is not None and isinstance(model, dict) and overridden(overrides, "model.head_dim"):
        heads, dim = model.get("q_heads"), model.get("head_dim")
        if isinstance(heads, int) and isinstance(dim, int) and width != heads * dim:
            product = f"q_heads x head_dim = {heads} x {dim}"
            raise UserError(f"embed_dim={width} is not {product}: leave embed_dim or model.head_dim out")
    if taken := _from_environment(written):
        named["from_environment"] = taken
    return named


def dictionary(node: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """Return a configuration, or a node of one, as a dictionary."""
    whole = OmegaConf.to_container(node, resolve=resolve)
    assert isinstance(whole, dict)
    return {str(name): value for name, value in whole.items()}


def _from_environment(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `${oc.env:NAME}` is in, or that refer to such a value, as they are written."""
    leaves = {key: value for key, value in flat(written).items() if "${" in str(value)}
    taken = {key for key, value in leaves.items() if "oc.env:" in str(value)}
    while taken:
        # By the last part of its name: `${model.path}`, `${.path}`.
        named = re.compile(rf"\$\{{[^}}]*\b({'|'.join(re.escape(key.rpartition('.')[2]) for key in taken)})\b")
        more = {key for key, value in leaves.items() if key not in taken and named.search(str(value))}
        if not more:
            break
        taken |= more
    return {key: leaves[key] for key in sorted(taken) if not key.startswith("tracker.")}


def isolation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `make_isolation` from a whole configuration."""
    return {**options["isolation"], "profiler_timeout_s": options["profiler_timeout_s"]}


def new_sweep_name(prefix: str = "", arguments: Sequence[str] = ()) -> str:
    """Return a default name for a sweep: the time, what the arguments vary, and a random part."""
    keys = [override_key(word).rpartition(".")[2] for word in arguments if _SEVERAL.match(word.partition("=")[2])]
    varied = re.sub(r"[^\w-]", "_", "-".join(keys))[:_LONGEST_VARIED]
    return "-".join([f"{prefix}{time.strftime('%Y-%m-%d_%H-%M-%S')}", *filter(None, [varied]), secrets.token_hex(2)])


def prepare_hydra(sweep: str, overrides: Sequence[str] = ()) -> None:
    """Register what `config.yaml` refers to.

    `${default_sweep:}` is the sweep's name unless the user gives one, `${by_host:A,B}` is B on a host without a GPU.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    OmegaConf.register_new_resolver("default_sweep", lambda: sweep, replace=True)
    small = no_gpu(overrides)
    OmegaConf.register_new_resolver(
        "documents", lambda n: [n // 2, n // 4, n // 8, n - n // 2 - n // 4 - n // 8], replace=True
    )
    OmegaConf.register_new_resolver("by_host", lambda gpu, cpu: cpu if small else gpu, replace=True)
    # hydra-ray-launcher, if it is installed, stores a schema named like our file, and Hydra would validate our file
    # with it. Plugins store their schemas when Hydra first searches for them.
    Plugins.instance()
    ConfigStore.instance().repo["hydra"].get("launcher", {}).pop("ray.yaml", None)


def compose_config(overrides: Sequence[str], sweep: str, own: Path | None = None) -> DictConfig:
    """Return the configuration that `attn-exp run` composes from these overrides; `own` is `--config-dir`.

    Raises UserError for a mistake in the overrides or in a file.
    """
    from hydra import compose, initialize_config_dir

    from attn_exp.config.check import explain_error_of_one_case, is_of_composing

    prepare_hydra(sweep, overrides)
    quoted = str(own or "").replace("'", "\\'")
    path = [f"hydra.searchpath=['file://{quoted}']"] if quoted else []
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return compose("config", [*path, *overrides])
    except Exception as error:
        if not is_of_composing(error):
            raise
        raise UserError(explain_error_of_one_case(error)) from error
