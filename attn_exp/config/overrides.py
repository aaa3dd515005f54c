"""Overrides as typed: the questions that must be answered before Hydra, which is slow to import, reads them."""

from collections.abc import Sequence


def override_key(argument: str) -> str:
    """Return the key that an override sets, adds or deletes: `batch` for `batch=8`, `+batch=8` and `~batch`."""
    return argument.partition("=")[0].lstrip("+~")


def overridden(arguments: Sequence[str], *keys: str) -> bool:
    """Return whether any of the arguments is an override of one of these keys."""
    return any(override_key(argument) in keys for argument in arguments)
