"""`attn-exp log`: stores records into MLflow that were measured before."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.commands.options import CONFIG_DIR, DEFAULT_STORE, FOLDER, Arguments, Command, Option, Positional
from attn_exp.core.errors import UserError

if TYPE_CHECKING:
    from attn_exp.execution.replay import Replayed
    from attn_exp.tracking.mlflow import MlflowPlace

LACKING, SKIPPED, INTERRUPTED = 1, 3, 130


def run(given: Arguments) -> int:
    """Store the sweeps that the words name; return the exit code."""
    try:
        return _log(given)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED


def _log(given: Arguments) -> int:
    from attn_exp.results.read import sweep_folders
    from attn_exp.results.there import HOME
    from attn_exp.tracking.location import option_uri

    overrides = list(given.overrides)
    for word in overrides:
        if word.lstrip("+~").partition("=")[0].split(".")[0] != "tracker":
            raise UserError(f"there is no option '{word.partition('=')[0]}=': {COMMAND.near(word, 'tracker=')}")
    for name in ("uri", "mlflow_experiment"):
        if name in given.values:
            overrides.append(f"tracker.{name}={given.values[name]}")
    if "uri" in given.values:
        option_uri(given.values["uri"])
    folders = sweep_folders(given.words, Path(given.get("folder", HOME)))
    place = _place(overrides, given.get("config_dir"))
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
    from attn_exp.tracking.mlflow import MlflowPlace

    config = resolved_config(compose_config(overrides, "log", own_choices), overrides)["tracker"]
    if config.get("name") != "mlflow":
        raise UserError(f"tracker={config.get('name')} stores nothing: choose tracker=mlflow or tracker=server")
    place = MlflowPlace(config)
    place.check()
    return place


def _replay(folder: Path, place: "MlflowPlace") -> "Replayed":
    from attn_exp.execution.replay import Replayed, replay
    from attn_exp.tracking.trouble import refusal

    # A store that cannot be reached may raise whatever its libraries raise.
    try:
        return replay(folder, place.runs)
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
    about=(
        "Stores records into MLflow. Use it for a sweep that ran while the server was unavailable or with "
        "tracker=none, or for records from another machine. What is stored already is not stored again, so the same "
        "command may be repeated, also while the sweep runs."
    ),
    examples=(
        ("attn-exp log first", "the sweep multirun/first, into mlruns/mlflow.db"),
        ("attn-exp log first second tracker=server", "two sweeps, into the server of tracker=server"),
        ("attn-exp log 'nightly-*' uri=http://host:5000", "those that match, into that server"),
        ("attn-exp log /data/first", "a folder anywhere"),
    ),
    positional=Positional(
        name="SWEEP",
        help="a sweep's name in folder=, a pattern or a path; several with commas or spaces",
        least=1,
        commas=True,
        example="attn-exp log first",
    ),
    options=(
        Option(name="uri", value="URI", help="the MLflow store to write to", default=DEFAULT_STORE),
        Option(name="mlflow_experiment", value="NAME", help="the experiment in that store", default="attn_exp"),
        FOLDER,
        CONFIG_DIR,
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
    run=run,
)
main = COMMAND.main
