"""python -m attn_exp.log [--config-dir FOLDER] SWEEP [SWEEP ...] [tracker=NAME] [tracker.KEY=VALUE] [folder=multirun]

Stores records into MLflow: those of a sweep whose server was away, of one without a tracker, or somebody else's. What
is there already is not stored again: the same command twice is the same as once, also while the sweep goes on.

  python -m attn_exp.log first                                     the sweep multirun/first, into mlruns/mlflow.db
  python -m attn_exp.log first second tracker=server               two sweeps, into the server of tracker=server
  python -m attn_exp.log 'nightly-*' tracker.uri=http://host:5000  those that match, into that server
  python -m attn_exp.log /data/sweeps/first duel-2026-03-01_12-00-00-ab12   folders anywhere; duels too

Exit codes: 0; 1 the store lacks some of it still; 2 something to type differently; 3 files that are no records were
skipped, and the rest is stored.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.config.compose import compose_config, split_config_dir
from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.results.read import HOME, sweep_folders
from attn_exp.run.replay import Replayed, replay

if TYPE_CHECKING:
    from attn_exp.tracking.mlflow import MlflowPlace

LACKING, MISTAKE, SKIPPED, INTERRUPTED = 1, 2, 3, 130


def main(arguments: Sequence[str]) -> int:
    """Store the sweeps that the words name; the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else MISTAKE
    try:
        return _log(arguments)
    except UserError as error:
        print(f"attn_exp.log: {redacted(str(error))}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED


def _log(arguments: Sequence[str]) -> int:
    words, own_choices = split_config_dir(arguments)
    sweeps, overrides, home = _words(words)
    folders = sweep_folders(sweeps, Path(home))
    place = _place(overrides, own_choices)
    lacking = skipped = False
    for folder in folders:
        found = _replay(folder.resolve(), place)
        print(_sentence(found, place), flush=True)
        for broken in found.broken:
            print(f"skipped: {broken}", file=sys.stderr)
        lacking = lacking or found.error is not None
        skipped = skipped or bool(found.broken)
    return LACKING if lacking else SKIPPED if skipped else 0


def _words(arguments: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Sweeps, Hydra's overrides of the tracker, and the folder that sweeps are in."""
    sweeps, overrides, home = [], [], HOME
    for word in arguments:
        key, equals, value = word.partition("=")
        if equals and key == "folder":
            home = value
        elif equals and key.split(".")[0] == "tracker":
            overrides.append(word)
        elif equals and key == "sweep":
            raise UserError(f"a sweep needs no key here: python -m attn_exp.log {value}")
        elif equals or word.startswith("-"):
            raise UserError(f"'{word}' is no sweep and no option: the options are tracker=, tracker.uri=, folder=")
        else:
            sweeps.append(word)
    if not sweeps:
        raise UserError("there is nothing to store: name a sweep, for example python -m attn_exp.log first")
    return sweeps, overrides, home


def _place(overrides: Sequence[str], own_choices: Path | None) -> "MlflowPlace":
    from attn_exp.config.compose import resolved_config
    from attn_exp.tracking.mlflow import MlflowPlace

    config = resolved_config(compose_config(overrides, "log", own_choices))["tracker"]
    if config.get("name") != "mlflow":
        raise UserError(f"tracker={config.get('name')} stores nothing: choose tracker=mlflow or tracker=server")
    return MlflowPlace(config)


def _replay(folder: Path, place: "MlflowPlace") -> Replayed:
    from attn_exp.tracking.trouble import refusal

    # A store that cannot be reached may raise whatever its libraries raise.
    try:
        return replay(folder, place.runs)
    except UserError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is not None:
            raise UserError(f"MLflow at {place.shown} {refused}") from error
        return Replayed(name=folder.name, kind="sweep", error=error)


def _sentence(found: Replayed, place: "MlflowPlace") -> str:
    from attn_exp.tracking.trouble import trouble

    if found.error is not None and not (found.new or found.there or found.lacking):
        return (
            f"{found.name}: MLflow at {place.shown} took nothing ({trouble(found.error)}); the same command tries again"
        )
    if found.kind == "duel" and not found.lacking:
        return f"{found.name}: the duel {'is new' if found.new else 'was there'} in MLflow at {place.shown}"
    count = found.new + found.there + found.lacking
    said = f"{found.name}: {count} record{'s' if count != 1 else ''}, {found.new} new, {found.there} there already"
    if found.error is None:
        return f"{said}, in MLflow at {place.shown}"
    lacks = f"{found.lacking} it still lacks" if found.lacking else "the end of the sweep's run is lacking"
    return f"{said}, {lacks}: MLflow at {place.shown}: {trouble(found.error)}; the same command goes on from there"
