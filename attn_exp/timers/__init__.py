"""Timers: each turns a call into samples, and its name says what they measure.

A timer is one file here and one YAML in conf/timer, which names its class and its devices. Its constructor takes the
GPU, None on a CPU, and the state that the GPU's caches are to have before each call.
"""

from collections.abc import Mapping
from typing import Any

from attn_exp.backends.base import made_from
from attn_exp.core.catalogue import timer_of
from attn_exp.timers.gpu import Gpu
from attn_exp.timers.loop import Timer


def make_timer(name: str, gpu: Gpu | None, l2: str = "cold", chosen: Mapping[str, Any] | None = None) -> Timer:
    """Return a new timer by its name in the records, on a CPU if there is no GPU.

    `chosen` is the configuration's `timer` node, which describes a timer that does not come with the package.

    Raises:
        ValueError: there is no such timer, or it does not measure on this kind of device.
    """
    choice = timer_of(name, chosen or {})
    if ("cpu" if gpu is None else "cuda") not in choice.devices:
        raise ValueError(f"timer {name!r} does not measure on a {'CPU' if gpu is None else 'GPU'}")
    timer: Timer = made_from("timer", {"_target_": choice.target, "gpu": gpu, "l2": l2})
    return timer
