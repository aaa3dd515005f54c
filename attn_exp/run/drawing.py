"""The parent's side of the processes that draw a sweep's plots (attn_exp/plots/process.py)."""

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from attn_exp.core.cpu import allowed_cpus
from attn_exp.core.errors import UserError
from attn_exp.plots.task import Done, Task

_PROCESS = "attn_exp.plots.process"
# One process is enough for a chart. Beside them there are the worker, its compilers and the command itself.
_MOST, _CPUS_EACH = 4, 4
# A process that still imports on a slow disk, or draws a chart of thousands of jobs, is waited for.
_PATIENCE_S = 20.0


class Drawing:
    """Processes that import what draws beside the measuring, and then share the charts of a sweep.

    Args:
        parts: how many of them.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the processes, which import what they need."""
        for part in range(self._parts):
            command = [sys.executable, "-m", _PROCESS, str(part), str(self._parts), str(os.getpid())]
            # Ctrl-C reaches a terminal's whole foreground process group; the parent decides what it means.
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def begin(self, sweep: Path, into: Path, limit_s: float) -> None:
        """Have the charts of a sweep drawn into a folder; no chart is begun after `limit_s` seconds."""
        line = msgspec.json.encode(Task(sweep=str(sweep), into=str(into), limit_s=limit_s)) + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it ended, as `files` will notice
                process.stdin.write(line)
                process.stdin.flush()

    def files(self, into: Path, left_out: Callable[[], None] = lambda: None) -> list[Path]:
        """Wait for the charts and return their files, in the order of their names.

        `left_out` is called if the time did not suffice for all.

        Raises:
            UserError: not all of them could be drawn.
        """
        answers = self._answers(time.monotonic() + _PATIENCE_S)
        mistakes = [answer.mistake for answer in answers if answer.mistake is not None]
        if len(answers) < self._parts:
            mistakes.append("a process that draws them ended, or took too long")
        if mistakes:
            raise UserError(mistakes[0])
        if any(answer.left_out for answer in answers):
            left_out()
        return sorted(into / name for answer in answers for name in answer.files)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            # Closes the pipes and waits; what it was asked may still be in one of them.
            with contextlib.suppress(BrokenPipeError), process:
                pass
        self._processes.clear()

    def _answers(self, until: float) -> list[Done]:
        """Return the answers that come in time."""
        found: list[Done] = []
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, process.stdout)
            while selector.get_map() and (left_s := until - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(msgspec.MsgspecError):
                        found.append(msgspec.json.decode(key.data.readline(), type=Done))
        return found


def drawing_for(device: str) -> Drawing | None:
    """Return the processes for a sweep on this device, None where its plots are drawn when nothing is measured.

    Nothing of ours runs beside a measurement of the CPU, and a machine of few cores has none to spare.
    """
    parts = min(_MOST, len(allowed_cpus()) // _CPUS_EACH)
    return Drawing(parts) if device == "cuda" and parts else None
