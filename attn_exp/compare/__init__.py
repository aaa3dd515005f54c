"""Compare: from records to a decision. Reads records, never torch, Hydra or MLflow at import."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_exp.compare.comparison import Comparison
    from attn_exp.results.read import Sweep

__all__ = ["compare", "load"]


def load(
    name: str | Path, *, folder: str = "multirun", uri: str | None = None, experiment: str = "attn_exp"
) -> "Sweep":
    """The results of one sweep, from its folder (a name in `folder`, or a path) or from an MLflow store.

    `.results` are its records without their samples (`.record()` of one reads those), `.to_frame()` is a pandas
    DataFrame with a row a record and pass. What could not be read is named in `.broken`.

    Raises:
        UserError: no such sweep, or nothing in it.
    """
    from attn_exp.compare.answer import read_sweeps
    from attn_exp.compare.choice import Choice
    from attn_exp.core.errors import UserError

    found = read_sweeps(Choice(folder=folder, uri=uri, experiment=experiment), [str(name)])
    if len(found) != 1:
        raise UserError(f"{name} names {len(found)} sweeps: load one at a time")
    return found[0]


def compare(
    sweep: "str | Path | Sweep | Sequence[str | Path | Sweep]",
    against: "str | Path | Sweep | Sequence[str | Path | Sweep]" = (),
    **keys: Any,
) -> "Comparison":
    """Compare as `python -m attn_exp.compare` does, with its keys: `baseline="flash"`, `where="causal"`, `margin=0.03`.

    Sweeps are names, paths, or what `load` gave. Without `against`: the backends beside each other (`Rivals`); with it
    `Changes`; with `history=True` a `History`; with `published=FILE` `Published`. All have `.rows` and `.to_frame()`.

    Raises:
        UserError: what the command would refuse, in its words.
    """
    from attn_exp.compare.answer import compare_read
    from attn_exp.compare.choice import choice_from

    choice = choice_from(keys)
    new, old = (_read(side, choice.folder, choice.uri, choice.experiment) for side in (sweep, against))
    return compare_read(choice, new, old)


def _read(side: Any, folder: str, uri: str | None, experiment: str) -> "list[Sweep]":
    from attn_exp.results.read import Sweep

    several = [side] if isinstance(side, (str, Path, Sweep)) else list(side)
    return [
        one if isinstance(one, Sweep) else load(one, folder=folder, uri=uri, experiment=experiment) for one in several
    ]


class _Callable(ModuleType):
    """This module, which can be called: `from attn_exp import compare` gives the module of that name in any case."""

    def __call__(self, *arguments: Any, **keys: Any) -> "Comparison":
        return compare(*arguments, **keys)


sys.modules[__name__].__class__ = _Callable
