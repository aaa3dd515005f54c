"""python -m attn_exp.ui: MLflow's own pages over the runs of this project, on this machine alone by default.

Plain `mlflow ui` would open another, empty database. This one opens mlruns/mlflow.db and prints the address of a list
that has each sweep with its jobs under it (click its +) and the columns one compares by. Ctrl-C ends it.
"""

import argparse
import sys
from collections.abc import Sequence

from attn_exp.core.errors import UserError
from attn_exp.tracking.location import DEFAULT_URI, database_file
from attn_exp.tracking.mlflow_read import check_sweep
from attn_exp.tracking.ui import checked, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 after Ctrl-C, 2 for something to type differently, 1 if MLflow's server did not run."""
    parser = argparse.ArgumentParser(
        prog="python -m attn_exp.ui", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--uri", default=DEFAULT_URI, help="database to show (default: %(default)s)")
    parser.add_argument("--port", type=int, default=5000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, not the network)"
    )
    parser.add_argument("--experiment", default="attn_exp", help="experiment to open (default: %(default)s)")
    parser.add_argument(
        "--open-sweep", metavar="NAME", help="print the address of one sweep's jobs, fastest forward first"
    )
    given = parser.parse_args(arguments)
    try:
        uri = checked(given.uri, given.host, given.port)
        path = database_file(uri)
        if given.open_sweep is not None and path is not None:
            check_sweep(path, given.experiment, given.open_sweep)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return serve(uri, host=given.host, port=given.port, experiment=given.experiment, sweep=given.open_sweep)
