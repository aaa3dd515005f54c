"""Load a dispatch table, and refuse it where its times are not those of this machine and its libraries."""

import pkgutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pynvml
import torch

from attn_exp.backends.base import load_backend
from attn_exp.backends.package import Unavailable
from attn_exp.core.catalogue import about_backend, backend_options
from attn_exp.core.dispatch_table import DispatchTable, facts_of, read_table
from attn_exp.core.errors import UserError
from attn_exp.core.host.nvml import GpuState
from attn_exp.dispatch.dispatcher import Dispatcher
from attn_exp.worker.machine.environment import environment

_ANYWAY = "measure again and make a table of that with attn-exp pick, or load it with other_gpu='warn'"


def load(path: str | Path, other_gpu: Literal["refuse", "warn"] = "refuse") -> Dispatcher:
    """Load a dispatch table that `attn-exp pick` wrote.

    Args:
        path: the table.
        other_gpu: `refuse`, or `warn` and go on without missing backends. It applies if a backend is not installed, or
            if the GPU, the driver, torch, cuDNN or a backend's library is not the one that was measured.

    Returns:
        The dispatcher: `.attention` is a drop-in for `torch.nn.functional.scaled_dot_product_attention`, `with
        dispatcher:` puts it in its place, and `.register()` gives it to transformers.

    Raises:
        UserError: the file is no table of this version, was edited, or is refused as above.
    """
    if other_gpu not in ("refuse", "warn"):
        raise UserError(f"other_gpu={other_gpu!r} is neither 'refuse' nor 'warn'")
    table = read_table(Path(path))
    missing = _missing(table, path)
    differing = _differing(table, path)
    for sentence in filter(None, [*missing.values(), differing]):
        if other_gpu == "refuse":
            raise UserError(sentence)
        warnings.warn(sentence, stacklevel=2)
    return Dispatcher(table, [label for label in table.backends if label not in missing])


def _missing(table: DispatchTable, path: str | Path) -> dict[str, str]:
    """Return a sentence for each backend of the table that cannot be made here; a table must not say what code runs."""
    found = {}
    for label, config in table.backends.items():
        target = str(config.get("_target_"))
        if target not in backend_options():
            raise UserError(f"{path} names the class {target}, which is no backend of attn_exp: make it again")
        package = getattr(pkgutil.resolve_name(target), "package", None)
        try:
            if package is not None:
                package.load()
            # An option that this version of the backend does not take is said here, and not in the middle of a model.
            load_backend(dict(config))
        except Unavailable as error:
            count = sum(bucket.pick == label for bucket in table.buckets)
            found[label] = f"{path} picks {label} for {count} shapes, and {error}"
    return found


def _differing(table: DispatchTable, path: str | Path) -> str | None:
    """Return in one sentence what is other here than where the table was measured; None if nothing is."""
    device = table.fingerprint["device"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if device == "cpu" and gpu is not None:
        return f"{path} was measured on a CPU, and this machine has a GPU, {gpu}: {_ANYWAY}"
    if device != "cpu" and gpu is None:
        return f"{path} was measured on {table.fingerprint.get('gpu')}, and this machine has no GPU: {_ANYWAY}"
    packages = {
        package for config in table.backends.values() for package in about_backend(str(config.get("name"))).packages
    }
    here = facts_of(device, _environment(device), packages)
    pairs = {name: (value, here.get(name, "none")) for name, value in table.fingerprint.items()}
    other = [f"{name} {old} and not {new}" for name, (old, new) in pairs.items() if old != new]
    return f"{path} was measured with {', '.join(other)} as here: {_ANYWAY}" if other else None


def _environment(device: str) -> Mapping[str, Any]:
    facts = environment(device)
    if device == "cuda":
        try:
            facts |= GpuState(facts["gpu_uuid"]).constant()
        except pynvml.NVMLError:
            return facts
    return facts
