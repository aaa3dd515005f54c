"""Start the process that searches, and follow it until it ends."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from attn_exp.core.errors import UserError, how_it_ended, last_message
from attn_exp.core.hunting import Question, Search
from attn_exp.run.hunt_report import progress_line

# The search ends by itself; so long after its budget it hangs.
_PATIENCE_S = 900.0
# A line of progress where no terminal shows it in place.
_EVERY_S = 10.0


def search(question: Question, environment: Mapping[str, str]) -> Search:
    """Search until a bug is found or the budget is spent; print progress to standard error.

    Args:
        question: what to search.
        environment: the variables that the search's process gets.

    Raises:
        UserError: the backend cannot be loaded, or the search's process died.
    """
    where = "the GPU" if question.device == "cuda" else "the CPU"
    name = question.backend["name"]
    _say(f"hunting in {name} on {where} for {question.budget_s:g} s, seed={question.seed}", stays=True)
    state, shown = Search(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attn_exp-hunt-") as folder, open(Path(folder, "log"), "w+b") as log:
        # Hypothesis keeps files of its own.
        own = {"HYPOTHESIS_STORAGE_DIRECTORY": folder}
        with _process(question, {**environment, **own}, log) as (process, replies):
            for state in _states(replies, time.monotonic() + question.budget_s + _PATIENCE_S):
                if sys.stderr.isatty() or time.monotonic() - shown > _EVERY_S:
                    shown = time.monotonic()
                    _say(progress_line(state))
        if sys.stderr.isatty():
            _say("")
        if not state.over:
            log.seek(0)
            said = last_message(log.read().decode(errors="replace"))
            raise UserError(f"{name}: the search {how_it_ended(process.returncode)}: {said}")
    if state.mistake is not None:
        raise UserError(f"{name}: {state.mistake}")
    return state


@contextlib.contextmanager
def _process(
    question: Question, environment: Mapping[str, str], log: BinaryIO
) -> "Iterator[tuple[subprocess.Popen[bytes], int]]":
    """Start the search; at the end, leave no process of it behind."""
    replies, reply_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_exp.hunt", f"--reply-fd={reply_fd}", f"--parent={os.getpid()}"],
        stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[reply_fd], start_new_session=True, env=environment,
    )  # fmt: skip
    os.close(reply_fd)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(question))
        process.stdin.close()
        yield process, replies
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
    finally:
        # The process that runs examples is a child of the search and dies with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(replies)


def _states(replies: int, deadline: float) -> Iterator[Search]:
    """Yield the states that the search writes, until it ends or `deadline`."""
    rest = b""
    while time.monotonic() < deadline:
        if not select.select([replies], [], [], 1.0)[0]:
            continue
        part = os.read(replies, 1 << 16)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Search)


def _say(text: str, *, stays: bool = False) -> None:
    """Print progress to standard error: in place on a terminal unless it `stays`, else as a line."""
    terminal = sys.stderr.isatty()
    begin, end = ("\r\x1b[K", "\n" if stays else "") if terminal else ("", "\n")
    print(f"{begin}{text[:118]}", file=sys.stderr, end=end, flush=True)
