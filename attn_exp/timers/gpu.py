"""The GPU's clock and queue for the timers: the one interface that tests replace with a fake."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

# Measured on an H200, where `_sleep` counts cycles of a 1,978 MHz clock. A GPU with a slower clock sleeps a little
# longer, which is harmless: the blocker only has to hold long enough.
SLEEP_CYCLES_PER_US = 1980
# The name of the kernel that `torch.cuda._sleep` launches, which marks calls in traces. Ranges of NVTX belong to a
# thread, and autograd launches backward kernels from its own.
MARK = "spin_kernel"
_EVENTS = 1024
# Pairs of stamps that may be in the queue and read later.
_STAMPS = 64
# The counters of each multiprocessor. The grid has a block for each of them, twice: the scheduler fills all of them.
_STAMP = r"""
extern "C" __global__ void attn_exp_stamp(unsigned long long *stamp) {
    unsigned int multiprocessor;
    unsigned long long cycles, nanoseconds;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    stamp[2 * multiprocessor] = cycles;
    stamp[2 * multiprocessor + 1] = nanoseconds;
}
"""
# Bound before a backend is loaded: one that replaces them by accident does not reach the timers.
_record: Callable[..., None] = torch.cuda.Event.record
_query: Callable[..., bool] = torch.cuda.Event.query
_wait: Callable[..., None] = torch.cuda.Event.synchronize
_elapsed_time: Callable[..., float] = torch.cuda.Event.elapsed_time
_sleep: Callable[[int], None] = torch.cuda._sleep
_synchronize: Callable[[], None] = torch.cuda.synchronize
_FLUSH_ROW = 4096


@dataclass(frozen=True)
class Span:
    """What ran between two stamps: the mean clock of the multiprocessors in MHz, and begin and end in seconds."""

    clock_mhz: float
    begin_s: float
    end_s: float


class Gpu:
    """The current CUDA device and stream: an in-order queue, events in it, and a kernel of known length."""

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        # Twice the cache's size evicts its contents. Read instead of written: dirty lines would be written back while
        # the next call is timed. Sums of rows, since a sum of all elements would take two kernels.
        self._flush_buffer = torch.randn(2 * l2_bytes // 4 // _FLUSH_ROW, _FLUSH_ROW, device="cuda")
        self._flush_sums = torch.empty(len(self._flush_buffer), device="cuda")
        # Reused, since creating an event costs as much host time as recording it. At most two blocks, of up to 404
        # events each, are in the queue at once.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_EVENTS)]
        for event in events:
            event.record()  # CUDA creates an event when it is first recorded, which takes longer
        self._events = itertools.cycle(events)
        # Written by the GPU into the host's memory: reading them waits for nothing behind them.
        count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._stamps = itertools.cycle(torch.zeros(_STAMPS, count, 2, dtype=torch.int64, pin_memory=True).unbind())
        self._grid = (2 * count, 1, 1)
        self._stamp: Any = None
        try:
            self._stamp = torch.cuda._compile_kernel(_STAMP, "attn_exp_stamp")
        except Exception:  # without NVRTC clocks are not known, and times are valid
            self.no_clock = True
        else:
            self.no_clock = False

    def now_us(self) -> float:
        """Return the host time in microseconds."""
        return perf_counter_ns() / 1e3

    def event(self) -> torch.cuda.Event:
        """Enqueue a timing event and return it; it is reused after some hundred others."""
        event = next(self._events)
        _record(event)
        return event

    def stamp(self) -> torch.Tensor | None:
        """Enqueue a stamp of the GPU's cycle counter and its clock; None if this GPU or PyTorch has no such kernel."""
        if self.no_clock:
            return None
        stamp = next(self._stamps)
        stamp.zero_()
        self._stamp(grid=self._grid, block=(32, 1, 1), args=[stamp])
        return stamp

    def span(self, first: torch.Tensor | None, second: torch.Tensor | None) -> Span | None:
        """Return what two stamps say that the queue has passed; None if they say nothing.

        The clock is that of the busiest multiprocessor: the counter of one that idles stands still.
        """
        if first is None or second is None:
            return None
        both = [
            (1e3 * (later - cycles) / (end_ns - begin_ns), begin_ns, end_ns)
            for (cycles, begin_ns), (later, end_ns) in zip(first.tolist(), second.tolist(), strict=True)
            if begin_ns and end_ns > begin_ns and later > cycles
        ]
        if not both:
            return None
        clock_mhz, begin_ns, end_ns = max(both)
        return Span(clock_mhz, begin_ns / 1e9, end_ns / 1e9)

    def passed(self, event: torch.cuda.Event) -> bool:
        """Whether the queue has passed an event."""
        return _query(event)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the queue has passed an event, no longer; errors of earlier work are raised here."""
        _wait(event)

    def elapsed_us(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the GPU time between two passed events in microseconds."""
        return _elapsed_time(first, second) * 1e3

    def sleep_us(self, duration_us: float) -> None:
        """Enqueue PyTorch's spinning kernel, which does nothing for about this long and cannot deadlock."""
        _sleep(int(duration_us * SLEEP_CYCLES_PER_US))

    def mark(self) -> None:
        """Enqueue the shortest possible kernel of the name `MARK`, which is found again in a trace."""
        _sleep(1)

    def flush(self, l2: str) -> None:
        """Enqueue a read of twice the L2 cache's size, or a write of it if `l2` is `written`.

        A read leaves clean cache lines, a write leaves dirty ones, which later calls have to write back.
        """
        if l2 == "written":
            self._flush_buffer.zero_()
        else:
            torch.sum(self._flush_buffer, 1, out=self._flush_sums)

    def synchronize(self) -> None:
        """Wait until the device is idle; errors of earlier work are raised here."""
        _synchronize()
