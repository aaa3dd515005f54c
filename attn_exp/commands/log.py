"""`attn-exp log`: stores records into MLflow that were measured before."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.commands.options import DEFAULT_STORE, Command
from attn_exp.core.errors import UserError
from attn_exp.core.options import Options, config_dir_option, folder_option, option, sweeps_option

if TYPE_CHECKING:
    from attn_exp.execution.replay import Replayed
    from attn_exp.tracking.location import MlflowPlace

LACKING, SKIPPED, INTERRUPTED = 1, 3, 130


@dataclass(frozen=True, kw_only=True)
class LogOptions(Options):
    """Stores records into MLflow.

    Use it for a sweep that ran while the server was unavailable or with tracker=none, or for records from another
    machine. What is stored already is not stored again, so the same command may be repeated, also while the sweep runs.
    """

    sweep: tuple[str, ...] = sweeps_option(example="attn-exp log first")
    uri: str | None = option("the MLflow store to write to", "URI", shown=DEFAULT_STORE)
    mlflow_experiment: str | None = option("the experiment in that store", "NAME", shown="attn_exp")
    folder: Path = folder_option()
    config_dir: Path | None = config_dir_option()


def run(options: LogOptions) -> int:
    """Store the sweeps that the words name; return the exit code."""
    try:
        return _log(options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED


def _log(options: LogOptions) -> int:
    from attn_exp.results.read import sweep_folders
    from attn_exp.tracking.location import option_uri

    overrides = list(options.overrides)
    for word in overrides:
        if word.lstrip("+~").partition("=")[0].split(".")[0] != "tracker":
            raise UserError(f"there is no option '{word.partition('=')[0]}=': {COMMAND.near(word, 'tracker=')}")
    for name in ("uri", "mlflow_experiment"):
        if value := getattr(options, name):
            overrides.append(f"tracker.{name}={value}")
    if options.uri is not None:
        option_uri(options.uri)
    folders = sweep_folders(options.sweep, options.folder)
    place = _place(overrides, options.config_dir)
    lacking = skipped = False
    for folder in folders:
        replayed = _replay(folder.resolve(), place)
        print(_sentence(replayed, place), flush=True)
        for note in replayed.notes:
            print(note, file=sys.stderr)
        for broken in replayed.broken:
            print(f"skipped: {broken}", file=sys.stderr)
        lacking = lacking or replayed.error is not None
        skipped = skipped or bool(replayed.broken)
    return LACKING if lacking else SKIPPED if skipped else 0


def _place(overrides: Sequence[str], own_choices: Path | None) -> "MlflowPlace":
    from attn_exp.config.compose import compose_config, resolved_config
    from attn_exp.tracking.location import MlflowPlace

    config = resolved_config(compose_config(overrides, "log", own_choices), overrides)["tracker"]
    if config.get("name") != "mlflow":
        raise UserError(f"tracker={config.get('name')} stores nothing: choose tracker=mlflow or tracker=server")
    place = MlflowPlace(config)
    place.check()
    return place


def _replay(folder: Path, place: "MlflowPlace") -> "Replayed":
    from attn_exp.execution.replay import Replayed, replay
    from attn_exp.tracking.runs import Runs
    from attn_exp.tracking.trouble import refusal

    # A store that cannot be reached may raise whatever its libraries raise.
    try:
        return replay(folder, partial(Runs, place))
    except UserError:
        raise
    except Exception as error:
        refused = refusal(error, "uri")
        if refused is not None:
            raise UserError(f"MLflow at {place.shown} {refused}") from error
        return Replayed(name=folder.name, error=error)


def _sentence(replayed: "Replayed", place: "MlflowPlace") -> str:
    from attn_exp.tracking.trouble import trouble

    if replayed.error is not None and not (replayed.new or replayed.there or replayed.lacking):
        return (
            f"{replayed.name}: MLflow at {place.shown} took nothing ({trouble(replayed.error, 'uri')}); "
            "the same command tries again"
        )
    count = replayed.new + replayed.there + replayed.lacking
    records = f"{count} record{'s' if count != 1 else ''}"
    said = f"{replayed.name}: {records}, {replayed.new} new, {replayed.there} there already"
    if replayed.error is None:
        return f"{said}, in MLflow at {place.shown}"
    lacks = f"{replayed.lacking} it still lacks" if replayed.lacking else "the end of the sweep's run is lacking"
    reason = trouble(replayed.error, "uri")
    return f"{said}, {lacks}: MLflow at {place.shown}: {reason}; the same command goes on from there"


COMMAND = Command(
    name="log",
    usage="SWEEP [SWEEP ...] [uri=URI] [tracker=NAME] [OPTION=VALUE ...]",
    options=LogOptions,
    run=run,
    examples=(
        ("attn-exp log first", "the sweep multirun/first, into mlruns/mlflow.db"),
        ("attn-exp log first second tracker=server", "two sweeps, into the server of tracker=server"),
        ("attn-exp log 'nightly-*' uri=http://host:5000", "those that match, into that server"),
        ("attn-exp log /data/first", "a folder anywhere"),
    ),
    overrides=(
        ("tracker=NAME", "mlflow or server"),
        ("tracker.KEY=VALUE", "any key of the tracker: tracker.artifacts=FOLDER"),
    ),
    exits=(
        "0 all is stored",
        "1 the store lacks some of it still",
        "2 invalid command line",
        "3 some files are not valid records and were skipped; the rest is stored",
    ),
)
main = COMMAND.main
