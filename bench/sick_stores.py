"""python bench/sick_stores.py [--only KIND ...]: what a sick store costs a sweep.

Runs a sweep of six jobs that compute next to nothing on the CPU, with each kind of sick store: database files and
tracking servers. Before each of them it runs the same sweep with `tracker=none`; the difference is what the store cost.
Exit code 1 if any costs more than 10 s. Run it on an idle machine.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from bookkeeping import HERE, TINY  # noqa: E402
from test_tracking_patience import SICK, Sick, sick_server  # noqa: E402

from attn_exp.tracking.client import silence  # noqa: E402
from attn_exp.tracking.database import prepare_database  # noqa: E402

LIMIT_S = 10.0
_COMMAND_LIMIT_S = 300.0
_SAID = 100
# FUSE's first request and the answer to it: https://www.kernel.org/doc/html/latest/filesystems/fuse.html.
_FUSE_INIT, _FUSE_VERSION, _REQUEST_BYTES = 26, (7, 26), 1 << 17


def _late(sick: Sick) -> None:
    """Answer rightly what an empty server would, five seconds late."""
    time.sleep(5.0)
    sick.status(404, {}, b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}')


def _healthy(path: Path) -> None:
    silence()
    prepare_database(path)


@contextlib.contextmanager
def _locked(path: Path, how: str) -> Iterator[str]:
    _healthy(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"BEGIN {how}")
        yield f"sqlite:///{path}"


@contextlib.contextmanager
def _planted(path: Path, plant: Callable[[Path], object]) -> Iterator[str]:
    plant(path)
    yield f"sqlite:///{path}"


@contextlib.contextmanager
def _hanging(path: Path) -> Iterator[str]:
    """Mount a file system that answers nothing, as a network's does whose server is gone; root only."""
    folder = path.parent / "hanging"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hanging", bytes(folder), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    request = os.read(device, _REQUEST_BYTES)
    (operation, unique) = struct.unpack_from("=IQ", request, 4)
    assert operation == _FUSE_INIT
    body = struct.pack("=IIIIHHIIHH8I", *_FUSE_VERSION, 0, 0, 0, 0, 1 << 16, 0, 0, 0, *[0] * 8)
    os.write(device, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)
    try:
        yield f"sqlite:///{folder / 'mlflow.db'}"
    finally:
        libc.umount2(bytes(folder), 2)
        os.close(device)


@contextlib.contextmanager
def _served(answer: Callable[[Sick], None]) -> Iterator[str]:
    with sick_server(answer) as (uri, _):
        yield uri


# The folder's file `mlflow.db` as an argument.
STORES: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "healthy, to be made": lambda path: _planted(path, lambda _: None),
    "healthy file": lambda path: _planted(path, _healthy),
    "locked file": lambda path: _locked(path, "EXCLUSIVE"),
    "file locked against writing": lambda path: _locked(path, "IMMEDIATE"),
    "dangling link": lambda path: _planted(path, lambda path: path.symlink_to("nowhere/x.db")),
    "folder": lambda path: _planted(path, Path.mkdir),
    "pipe": lambda path: _planted(path, os.mkfifo),
    "hanging disk": _hanging,
    **{f"server: {kind}": (lambda path, kind=kind: _served(SICK[kind])) for kind in SICK},  # type: ignore[misc]
    "server: 5 s late": lambda path: _served(_late),
}


def seconds(folder: Path, *tracker: str) -> tuple[float, int, str]:
    """Run the sweep in a folder: seconds, exit code, and what it said last."""
    arguments = ["-m", *TINY, f"batch={','.join(map(str, range(1, 7)))}", *tracker]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE), str(TESTS.parent)])
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "attn_exp", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_COMMAND_LIMIT_S,
        check=False,
    )
    said = [line for line in ran.stderr.splitlines() if "MLflow at" in line or "tracker" in line]
    return time.monotonic() - began, ran.returncode, said[-1] if said else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python bench/sick_stores.py", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STORES, default=list(STORES), help="some of the stores")
    given = parser.parse_args()
    print(f"{'store':28} {'none':>6} {'with it':>8} {'extra':>6}  exit code, load, what was said")
    worst = 0.0
    for kind in given.only:
        folder = Path(tempfile.mkdtemp(prefix="attn_exp_sick_"))
        try:
            with STORES[kind](folder / "mlflow.db") as uri:
                without, *_ = seconds(folder, "tracker=none")
                took, code, said = seconds(folder, "tracker=mlflow", f"tracker.uri={uri}")
            worst = max(worst, took - without)
            row = f"{kind:28} {without:6.1f} {took:8.1f} {took - without:6.1f}  {code}, {os.getloadavg()[0]:.1f}"
            print(f"{row}  {said[:_SAID]}".rstrip(), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if worst > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
