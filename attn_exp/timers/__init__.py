"""Timers: each turns a call into samples, and its name says what they measure."""

from attn_exp.timers.cpu import CpuTimer
from attn_exp.timers.device import DeviceTimer
from attn_exp.timers.event import EventTimer
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.graph import GraphTimer
from attn_exp.timers.kernel import KernelTimer
from attn_exp.timers.loop import Timer
from attn_exp.timers.wall import DispatchTimer, WallTimer


def make_timer(name: str, gpu: Gpu | None, l2: str = "cold") -> Timer:
    """A new timer by its name in the records; `gpu` is None on a CPU.

    Raises:
        ValueError: a GPU's timer without a GPU, or the other way round.
    """
    if name == "cpu" and gpu is None:
        return CpuTimer()
    if gpu is not None:
        for timer in (DeviceTimer, EventTimer, KernelTimer, GraphTimer, WallTimer, DispatchTimer):
            if name == timer.name:
                return timer(gpu, l2)
    raise ValueError(f"timer {name!r} does not measure on a {'CPU' if gpu is None else 'GPU'}")
