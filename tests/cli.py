"""Runs the real command line in a process of its own, and looks for what it left behind."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from attn_exp.cli import COMMANDS
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder

TESTS = Path(__file__).resolve().parent
# Small and fast, on the CPU whatever the machine has: without gradients, for which a worker imports half a second more.
_SMALL = (
    *("device=cpu", "batch=1", "seq_len=32", "model.q_heads=2", "model.kv_heads=2", "model.head_dim=16", "dtype=fp32"),
    *("stopping.min_rounds=2", "stopping.max_rounds=2", "stopping.budget_s=0.01"),
    "passes=[forward]",
    # Seconds at the end of each sweep; whoever wants them says so after these.
    "save_plots=false",
)
# Importing MLflow takes seconds of each command: only where a test reads its database, as `runs` does.
# A busy machine takes long to make a store.
QUICK, TRACKED = (*_SMALL, "tracker=none"), (*_SMALL, "tracker=mlflow", "tracker.patience_s=300")


def environment() -> dict[str, str]:
    """The tests' environment, with their backends importable and a marker that children inherit."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `python -m attn_exp ...`, a run with the tests' own backends among the choices."""
    measures = not (arguments and arguments[0] in COMMANDS)
    flags = ["--config-dir", str(TESTS / "conf")] if measures else []
    return subprocess.Popen(
        [sys.executable, "-m", "attn_exp", *flags, *arguments],
        cwd=cwd,
        env=environment() | {"ATTN_EXP_TEST": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end, at most 5 minutes."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def on_terminal(*arguments: str, cwd: Path, columns: int) -> str:
    """Run it on a terminal of so many columns; return all that was written to it, lines that were removed included."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    unset = {name: value for name, value in environment().items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_exp", *arguments],
        cwd=cwd,
        env=unset | {"TERM": "xterm"},
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    shown = b""
    # A terminal that nobody holds any more is a mistake to read.
    with contextlib.suppress(OSError):
        while part := os.read(own, 1 << 16):
            shown += part
    os.close(own)
    assert process.wait(300) == 0, shown.decode()
    return shown.decode()


def complaints(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines on standard error that are not progress."""
    return without_progress(ran.stderr)


def without_progress(err: str) -> list[str]:
    """The lines that are not `[1/6] ok ...`, and not what is done for long already, which a busy machine makes."""
    progress = re.compile(r"No GPU found: .*|\[ *\d+/\d+\] .*|not all plots were .*|attn-exp compare .* plots=plots")
    return [line for line in err.splitlines() if not progress.fullmatch(line)]


def finished(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the finished jobs."""
    return [line for line in ran.stderr.splitlines() if re.match(r"\[ *\d+/\d+\] ", line)]


def records(cwd: Path, sweep: str) -> dict[str, Record]:
    """The records of a sweep by backend, or by backend and batch where a backend has several."""
    found = read_folder(cwd / "multirun" / sweep, may_be_empty=True)
    assert not found.broken
    by_name: dict[str, Record] = {}
    for record in found.records():
        name = record.request.backend["name"]
        by_name[name if name not in by_name else f"{name}-{record.request.case.batch}"] = record
    return by_name


def left_behind(cwd: Path) -> list[int]:
    """Processes that were started by a run in `cwd` and still live, by the marker in their environment."""
    marker = f"ATTN_EXP_TEST={cwd}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            continue
        if marker in variables and state != "Z":
            found.append(int(folder.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Wait until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    """Send a signal to the process alone; what it printed until it was gone."""
    process.send_signal(number)
    return process.communicate(timeout=240)


def runs(cwd: Path) -> list[tuple[str, str, dict[str, str]]]:
    """Name, status and tags of every run that MLflow's database holds and has not deleted."""
    with sqlite3.connect(cwd / "mlruns" / "mlflow.db") as database:
        tags: dict[str, dict[str, str]] = {}
        for run_id, key, value in database.execute("select run_uuid, key, value from tags"):
            tags.setdefault(run_id, {})[key] = value
        rows = database.execute("select run_uuid, name, status from runs where lifecycle_stage = 'active'")
        return [(name, status, tags.get(run_id, {})) for run_id, name, status in rows]
