"""`attn-exp ui`: MLflow's own pages over the runs of this project."""

import os
from dataclasses import dataclass

from attn_exp.commands.options import DEFAULT_STORE, Command
from attn_exp.core.options import Options, option
from attn_exp.core.values import port


@dataclass(frozen=True, kw_only=True)
class UiOptions(Options):
    """Starts the MLflow UI on this project's database, which plain `mlflow ui` would not find.

    A tracking server runs already. Prints the address of a list that has each sweep with its answer, and its jobs under
    it (click its +); or of one sweep's charts, in its backends' colours, and of its own page, which begins with its
    answer. Ctrl-C ends it.
    """

    sweep: str | None = option("the sweep to open; all sweeps without it", "SWEEP", example="attn-exp ui first")
    uri: str | None = option("the database or the tracking server to show", "URI", shown=DEFAULT_STORE)
    port: int = option("the port to listen on", "N", default="5000", read=port)
    host: str = option("the address to listen on", "ADDRESS", default="127.0.0.1", shown="127.0.0.1, not the network")
    mlflow_experiment: str | None = option("the experiment in the MLflow store", "NAME", shown="attn_exp")


def run(options: UiOptions) -> int:
    """Serve the pages until Ctrl-C; return the exit code."""
    from attn_exp.core.redaction import redacted
    from attn_exp.tracking.location import is_server
    from attn_exp.tracking.mlflow_read import pages
    from attn_exp.tracking.ui import checked, serve, show

    experiment = options.mlflow_experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "attn_exp")
    uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)
    uri = checked(uri, options.host, options.port)
    found = pages(uri, experiment, options.sweep)
    if is_server(uri):
        show(redacted(uri), found)
        return 0
    return serve(uri, found, host=options.host, port=options.port)


COMMAND = Command(
    name="ui",
    usage="[SWEEP] [port=N] [uri=URI] [OPTION=VALUE ...]",
    options=UiOptions,
    run=run,
    examples=(
        ("attn-exp ui", "all sweeps in mlruns/mlflow.db"),
        ("attn-exp ui first port=5001", "the charts of one sweep, on another port"),
        ("attn-exp ui uri=sqlite:////data/mlruns/mlflow.db", "another database"),
    ),
    exits=("0 ended by Ctrl-C", "1 MLflow's server did not run", "2 invalid command line"),
)
main = COMMAND.main
