"""The command line of a worker, for modules of these tests that take its place."""

import argparse


def arguments() -> argparse.Namespace:
    """What execution/worker_process.py starts a worker with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--reply-fd", type=int)
    parser.add_argument("--parent", type=int)
    return parser.parse_args()
