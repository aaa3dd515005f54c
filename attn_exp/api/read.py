"""Load a sweep, and compare sweeps. Imports nothing heavy before a function is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TypeAlias, Unpack

    from attn_exp.api.sweep import Sweep
    from attn_exp.comparison.changes import Changes
    from attn_exp.comparison.comparison import Comparison
    from attn_exp.comparison.history import History
    from attn_exp.comparison.rivals import Rivals
    from attn_exp.results.read import Sweep as AnySweep

    Sweeps: TypeAlias = str | Path | AnySweep | Sequence[str | Path | AnySweep]


class Keys(TypedDict, total=False):
    """The options of every comparison, as those of `attn-exp compare`. Shares are numbers or text: 0.03 or "3%"."""

    where: str
    sort: str
    metric: str
    margin: float | str
    spread: float | str
    anyway: bool
    folder: str | Path
    uri: str
    mlflow_experiment: str


class RankingKeys(Keys, total=False):
    """The options of a comparison of backends with each other."""

    baseline: str
    by: str | Sequence[str]


def load(
    name: str | Path, *, folder: str | Path = "multirun", uri: str | None = None, mlflow_experiment: str = "attn_exp"
) -> Sweep:
    """Load the results of one sweep from its folder or from an MLflow store.

    Args:
        name: the sweep's name in `folder`, or the path of its folder.
        folder: the folder of the sweeps' folders.
        uri: the MLflow store to read from instead, for example `sqlite:///mlruns/mlflow.db`.
        mlflow_experiment: the experiment in that store.

    Returns:
        The sweep: its rows, `.answer`, `.to_frame()`, `.plot()` and `.report()`; `.broken` says which files could not
        be read and why.

    Raises:
        UserError: there is no such sweep, or it has no records.
    """
    from pathlib import Path

    from attn_exp.api.sweep import Sweep
    from attn_exp.comparison.answer import read_sweeps
    from attn_exp.comparison.choice import Choice
    from attn_exp.core.errors import UserError

    choice = Choice(folder=Path(folder), uri=uri, mlflow_experiment=mlflow_experiment)
    sweeps = read_sweeps(choice, [str(name)])
    if len(sweeps) != 1:
        raise UserError(f"{name} names {len(sweeps)} sweeps: load one at a time")
    return Sweep.of(sweeps[0])


@overload
def compare(sweep: Sweeps, **keys: Unpack[RankingKeys]) -> Rivals: ...
@overload
def compare(sweep: Sweeps, against: Sweeps, **keys: Unpack[Keys]) -> Changes: ...
@overload
def compare(sweep: Sweeps, *, history: Literal[True], **keys: Unpack[Keys]) -> History: ...


def compare(sweep: Sweeps, against: Sweeps = (), **keys: Any) -> Comparison:
    """Compare sweeps as `attn-exp compare` does, with the same options: `baseline="flash"`, `where="causal"`.

    Args:
        sweep: one or several sweeps, each a name, a path, or what `load` returned.
        against: earlier sweeps to compare with.
        **keys: `where`, `sort`, `metric`, `margin`, `spread`, `anyway`, `folder`, `uri`, `mlflow_experiment` for all
            comparisons; `baseline` and `by` for a comparison of backends; `history=True` chooses
            another comparison.

    Returns:
        `Rivals`, the backends of a sweep compared with each other; with `against` `Changes`; with `history=True` a
        `History`. All have `.rows` and `.to_frame()`.

    Raises:
        UserError: an option or value that the command would refuse, with the same message.
    """
    from pathlib import Path

    from attn_exp.comparison.answer import compare_read
    from attn_exp.comparison.choice import choice_from
    from attn_exp.results.read import Sweep as AnySweep

    choice = choice_from(keys)

    def read(side: Sweeps) -> list[AnySweep]:
        several = [side] if isinstance(side, (str, Path, AnySweep)) else side
        folder, uri, experiment = choice.folder, choice.uri, choice.mlflow_experiment
        return [
            one if isinstance(one, AnySweep) else load(one, folder=folder, uri=uri, mlflow_experiment=experiment)
            for one in several
        ]

    return compare_read(choice, read(sweep), read(against))
