"""The worker's side of the process that reads NVML beside what is timed."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from attn_exp.core.host.energy import Reading, moment
from attn_exp.core.record.window import SILENCE_S

_PROCESS = "attn_exp.worker.machine.nvml_process"
# A process that died or stopped answering is started again, so often.
_STARTS = 3
_MOST_BYTES = 1 << 20


class NvmlReader:
    """Readings of one GPU between `begin` and `end`; neither waits for anything."""

    source = "nvml"

    def __init__(self, uuid: str, command: Sequence[str] = (sys.executable, "-m", _PROCESS)) -> None:
        self._uuid, self._command = uuid, tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._from, self._since, self._answered = 0, 0, 0.0, True
        self._file = os.memfd_create("attn_exp_readings")
        # The process shares the descriptor: with its own position it would write over what `ftruncate` has cut off.
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
        weakref.finalize(self, os.close, self._file)

    @property
    def pid(self) -> int:
        """The number of the process, 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process unless it runs; it opens NVML while this one goes on."""
        if self._process is not None and self._process.poll() is None and self._answered:
            return
        self.stop()
        if self._starts == _STARTS:
            return
        self._starts, self._answered = self._starts + 1, True
        self._process = subprocess.Popen(
            [*self._command, self._uuid, str(self._file), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[self._file],
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process)

    def stop(self) -> None:
        """End the process, without waiting for one that hangs in the driver."""
        if self._process is not None:
            self._end()
            self._process = None

    def begin(self) -> None:
        """Have readings taken from now on."""
        if os.fstat(self._file).st_size > _MOST_BYTES:
            os.ftruncate(self._file, 0)
        # Before the process is started, which may write at once why it cannot go on.
        self._from, self._since = os.fstat(self._file).st_size, time.perf_counter()
        self.start()
        self._tell(b"+")

    def look(self) -> None:
        """Do nothing: the process looks by itself."""

    def end(self) -> tuple[list[Reading], str]:
        """Return the readings since `begin`, and what went wrong with them, empty if nothing did."""
        self._tell(b"-")
        # Looked at first, so that all that an ended process wrote is read.
        ended = self._process is None or self._process.poll() is not None
        content = os.pread(self._file, os.fstat(self._file).st_size - self._from, self._from)
        readings, trouble = [], ""
        # The last line may not be complete yet.
        for line in content.split(b"\n")[:-1]:
            try:
                fields = json.loads(line)
                if "error" in fields:
                    trouble = str(fields["error"])
                    continue
                one = Reading.of(fields)
            except (ValueError, KeyError, TypeError, AttributeError):
                trouble = "NVML's answers cannot be read"
                continue
            counted = None if one.energy_at is None else moment(one.energy_at)
            readings.append(replace(one, at=moment(one.at), energy_at=counted))
        # A pass may be over before the first answer.
        self._answered = bool(readings) or time.perf_counter() - self._since < SILENCE_S
        if ended:
            trouble = trouble or self._why_ended()
        return readings, trouble

    def _why_ended(self) -> str:
        """Return what the process said last of itself: it may have done so before `begin`."""
        said = os.pread(self._file, os.fstat(self._file).st_size, 0).split(b"\n")[:-1]
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            return str(json.loads(said[-1])["error"])
        return "the process that reads NVML ended"

    def _tell(self, word: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            os.write(self._process.stdin.fileno(), word)
        except OSError:
            # It ended, or hangs and no longer reads: `end` says so.
            self._answered = False


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        # A process that hangs in the kernel ends when its system call does.
        return
