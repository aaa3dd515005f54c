"""Run examples in a forked process, so that a crash or a hang is the outcome of an example and not the search's end.

This process imports torch and uses it for nothing, so that forks are as good as new processes, and cost milliseconds.
"""

import contextlib
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from attn_exp.backends.supports import Supports
from attn_exp.core.errors import how_it_ended
from attn_exp.core.host.process import die_with_parent, limit_memory, prefer_to_be_killed
from attn_exp.hunt.example import Example, Outcome
from attn_exp.worker.machine.device import import_autograd

# An example that takes longer hangs. Compilers take a minute for a kernel with all its configurations.
_LIMIT_S = {"cpu": 60.0, "cuda": 150.0}
_START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of a forked process: its backend's declared support, or why it cannot be loaded."""

    supports: Supports | None = None
    missing: str | None = None


class Tester:
    """A forked process that runs examples, replaced when it dies.

    There `make` returns its first words and the function that tries an example.
    """

    def __init__(self, make: Callable[[], tuple[Hello, Callable[[Example], Outcome]]], device: str) -> None:
        self._make = make
        self._device = device
        self._process: int | None = None
        self._to = self._from = -1
        self._read = b""
        self._forked = False

    def hello(self) -> Hello:
        """Start a process and return its first words."""
        self._fork()
        line = self._line(time.monotonic() + _START_S)
        if line:
            return msgspec.json.decode(line, type=Hello)
        hangs = line is None
        ended = how_it_ended(self.close())
        return Hello(missing=f"loading it takes longer than {_START_S:.0f} s" if hangs else f"the process {ended}")

    def outcome(self, example: Example, until: float) -> Outcome | None:
        """Return what comes of an example; None if it was still running at `until` (of `time.monotonic`)."""
        limit = time.monotonic() + _LIMIT_S[self._device]
        if self._process is None:
            self.hello()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._to, msgspec.json.encode(example) + b"\n")
        line = self._line(min(until, limit))
        if line:
            outcome = msgspec.json.decode(line, type=Outcome)
            if outcome.poisoned:
                self.close()
            return outcome
        code = self.close()
        if line is None:
            hangs = f"it had not returned after {_LIMIT_S[self._device]:.0f} s"
            return None if time.monotonic() < limit else Outcome(status="timeout", reason=hangs)
        if code == -signal.SIGKILL:
            return Outcome(status="out_of_memory", reason="the process was killed, as the kernel does for memory")
        return Outcome(status="crashed", reason=f"the process {how_it_ended(code)}")

    def close(self) -> int:
        """End the process and return its exit code, negative for a signal."""
        if self._process is None:
            return 0
        process, self._process, self._read = self._process, None, b""
        os.close(self._to)
        os.close(self._from)
        # One that has died keeps its own exit code; nobody waits for one that hangs.
        ended, status = os.waitpid(process, os.WNOHANG)
        deadline = time.monotonic() + 0.2
        while not ended and time.monotonic() < deadline:
            time.sleep(0.005)
            ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:
            os.killpg(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status)

    def _line(self, until: float) -> bytes | None:
        """Return the next line, empty if the process has ended, or None if there is none by `until`."""
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._from, 1 << 16)
            if not part:
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _fork(self) -> None:
        if self._forked:
            # Once for all forks of a backend that crashes again and again, not in each.
            import_autograd()
        self._forked = True
        tasks, outcomes, parent = os.pipe(), os.pipe(), os.getpid()
        self._process = os.fork()
        if self._process:
            os.close(tasks[0])
            os.close(outcomes[1])
            self._to, self._from = tasks[1], outcomes[0]
            return
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            prefer_to_be_killed()
            if self._device == "cpu":
                limit_memory()
            os.close(tasks[1])
            os.close(outcomes[0])
            hello, run = self._make()
            os.write(outcomes[1], msgspec.json.encode(hello) + b"\n")
            with os.fdopen(tasks[0], "rb") as lines:
                for line in lines:
                    answer = run(msgspec.json.decode(line, type=Example))
                    os.write(outcomes[1], msgspec.json.encode(answer) + b"\n")
        except BaseException:
            traceback.print_exc()
        finally:
            # Neither the search's code nor the interpreter's teardown is the fork's.
            os._exit(1)
