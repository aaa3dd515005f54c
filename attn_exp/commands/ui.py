"""`attn-exp ui`: MLflow's own pages over the runs of this project."""

import os

from attn_exp.commands.options import DEFAULT_STORE, MLFLOW_EXPERIMENT, Arguments, Command, Option, Positional
from attn_exp.core.values import port


def run(given: Arguments) -> int:
    """Serve the pages until Ctrl-C; return the exit code."""
    from attn_exp.core.redaction import redacted
    from attn_exp.tracking.location import is_server
    from attn_exp.tracking.mlflow_read import pages
    from attn_exp.tracking.ui import checked, serve, show

    host, number = given.get("host", "127.0.0.1"), given.get("port", 5000)
    experiment = given.get("mlflow_experiment", os.environ.get("MLFLOW_EXPERIMENT_NAME", "attn_exp"))
    uri = checked(given.get("uri", os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)), host, number)
    found = pages(uri, experiment, given.words[0] if given.words else None)
    if is_server(uri):
        show(redacted(uri), found)
        return 0
    return serve(uri, found, host=host, port=number)


COMMAND = Command(
    name="ui",
    usage="[SWEEP] [port=N] [uri=URI] [OPTION=VALUE ...]",
    about=(
        "Starts the MLflow UI on this project's database, which plain `mlflow ui` would not find; a tracking server "
        "runs already. Prints the "
        "address of a list that has each sweep with its answer, and its jobs under it (click its +); or of one sweep's "
        "charts, in its backends' colours, and of its own page, which begins with its answer. Ctrl-C ends it."
    ),
    examples=(
        ("attn-exp ui", "all sweeps in mlruns/mlflow.db"),
        ("attn-exp ui first port=5001", "the charts of one sweep, on another port"),
        ("attn-exp ui uri=sqlite:////data/mlruns/mlflow.db", "another database"),
    ),
    positional=Positional(
        name="SWEEP", help="the sweep to open; all sweeps without it", most=1, example="attn-exp ui first"
    ),
    options=(
        Option(name="uri", value="URI", help="the database or the tracking server to show", default=DEFAULT_STORE),
        Option(name="port", value="N", help="the port to listen on", read=port, default="5000"),
        Option(name="host", value="ADDRESS", help="the address to listen on", default="127.0.0.1, not the network"),
        MLFLOW_EXPERIMENT,
    ),
    exits=("0 ended by Ctrl-C", "1 MLflow's server did not run", "2 invalid command line"),
    run=run,
)
main = COMMAND.main
