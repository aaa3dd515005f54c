"""Backends that hurt the process they run in, each in its own way; for sweeps in real worker processes."""

import ctypes
import os
import re
import resource
import signal
import struct
import time
from functools import cache
from pathlib import Path

import torch
from fakes import Honest

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case import Case


class _Hurts(Honest):
    """Behaves until the forward is called."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        honest = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            self.hurt()
            return honest.forward()

        return Calls(forward, honest.backward)

    def hurt(self) -> None:
        raise NotImplementedError


class Segfaults(_Hurts):
    def hurt(self) -> None:
        ctypes.string_at(0)


class Raises(_Hurts):
    def hurt(self) -> None:
        raise RuntimeError("this backend raises\non two lines")


class Exits(_Hurts):
    def hurt(self) -> None:
        os._exit(3)


class Hangs(_Hurts):
    def hurt(self) -> None:
        time.sleep(3600)


class IgnoresSigterm(_Hurts):
    """Hangs in C code that holds the interpreter's lock, deaf to all that can be ignored."""

    def hurt(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(3600)


class ExhaustsMemory(_Hurts):
    """Takes memory until there is no more; the pages are never touched, so that nobody else is short of them."""

    def hurt(self) -> None:
        held = []
        while True:
            held.append(torch.empty(1 << 31))


class DiesLater(_Hurts):
    """Raises in its 41st call of 5 ms: in the middle of a duel."""

    calls = 0

    def hurt(self) -> None:
        self.calls += 1
        time.sleep(0.005)
        if self.calls > 40:
            raise RuntimeError("worn out")


class Slow(_Hurts):
    """Right, but a call takes a tenth of a second."""

    def hurt(self) -> None:
        time.sleep(0.1)


_ALARMS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_TIMERS = Path("/proc/self/timers")


def _create_timers() -> None:
    """Create POSIX timers that go off in 600 s, one for each kind of notice: a signal, none, and a thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    for notice in range(3):
        event = struct.pack("@PiiP40x", 0, signal.SIGALRM, notice, ctypes.cast(libc.abort, ctypes.c_void_p).value)
        number = ctypes.c_void_p()
        assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(number)) == 0
        assert libc.timer_settime(number, 0, struct.pack("@4l", 0, 0, 600, 0), None) == 0


def _process() -> dict[str, object]:
    """What a process has of the system, and a job may take away."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "timers": re.findall(r"ID: .*", _TIMERS.read_text()) if _TIMERS.exists() else [],
        "umask": umask,
        "folder": os.getcwd(),
        "processors": os.sched_getaffinity(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


@cache
def _at_start() -> dict[str, object]:
    return _process()


class LeavesMuch(Honest):
    """Leaves alarms, handlers, blocked signals, limits and more, and cannot bear what an earlier job has left."""

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        left: list[object] = [alarm for alarm in _ALARMS if signal.getitimer(alarm) != (0.0, 0.0)]
        left += [number for number in (signal.SIGALRM, signal.SIGUSR1) if signal.getsignal(number) != signal.SIG_DFL]
        left += [*signal.pthread_sigmask(signal.SIG_BLOCK, ()), *signal.sigpending()]
        left += [name for name, value in _at_start().items() if value != _process()[name]]
        if left:
            raise RuntimeError(f"an earlier job has left {left}")
        honest = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            for alarm in _ALARMS:
                signal.setitimer(alarm, 600.0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
            signal.raise_signal(signal.SIGUSR2)
            if _process()["timers"] == _at_start()["timers"]:
                _create_timers()
            os.umask(0o777)
            os.chdir("/")
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            return honest.forward()

        return Calls(forward, honest.backward)


class Printer(_Hurts):
    """Writes to both outputs, from Python and from C."""

    def hurt(self) -> None:
        print("printed by the backend")
        os.write(2, b"written by native code\n")
