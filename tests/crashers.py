"""Backends that hurt the process they run in, each in its own way; for sweeps in real worker processes."""

import ctypes
import os
import signal
import sys
import time

import torch
from fakes import Honest

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case.case import Case
from attn_exp.timers.cpu import CpuTimer


def is_timed() -> bool:
    """Whether the present call is one of a block of the timer `cpu`, and no estimate or check."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CpuTimer.block.__code__:
            return True
    return False


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


class HangsWhenMade(Honest):
    def __init__(self, name: str) -> None:
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
    """Raises in its ninth timed call of 5 ms: in the middle of a duel."""

    calls = 0

    def hurt(self) -> None:
        self.calls += is_timed()
        time.sleep(0.005)
        if self.calls > 8:
            raise RuntimeError("worn out")


class Slow(_Hurts):
    """Right, but a call takes a tenth of a second."""

    def hurt(self) -> None:
        time.sleep(0.1)


class Printer(_Hurts):
    """Reads standard input to its end, and writes to both outputs, from Python and from C."""

    def hurt(self) -> None:
        assert not sys.stdin.read() + os.read(0, 1).decode()
        print("printed by the backend")
        os.write(2, b"written by native code\n")


class SegfaultsLater(_Hurts):
    """Behaves while it is prepared and checked, and takes the process along when it is timed."""

    def hurt(self) -> None:
        if is_timed():
            ctypes.string_at(0)
