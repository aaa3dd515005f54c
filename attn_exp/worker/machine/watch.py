"""Watch the device while a pass is timed: its clock, power and energy, by readings beside the blocks."""

import time
from collections.abc import Mapping
from typing import Any

from attn_exp.core.host.cpu import allowed_cpus
from attn_exp.core.host.cpu_reader import CpuReader
from attn_exp.core.host.energy import Reading, moment
from attn_exp.core.record.record import Timing
from attn_exp.core.record.window import Window, window_of
from attn_exp.worker.machine.nvml_reader import NvmlReader


class Watch:
    """Readings beside the timing of one pass after the other; without a reader `note` says why there are none."""

    def __init__(
        self, reader: NvmlReader | CpuReader | None = None, note: str = "", limits: Mapping[str, Any] | None = None
    ) -> None:
        self._reader, self._note, self._limits = reader, note, limits or {}
        self._since = self._until = 0.0
        self._readings: list[Reading] = []
        self._trouble, self._watches, self._alone = "", False, True

    def start(self) -> None:
        """Get ready, in the background."""
        if self._reader is not None:
            self._reader.start()

    def begin(self, *, alone: bool = True) -> None:
        """Begin to read: the warm-up of a pass comes next, that of one call `alone` or of rivals."""
        self._alone = alone
        self._watches, self._since = True, time.perf_counter()
        if self._reader is not None:
            self._reader.begin()

    def look(self) -> None:
        """Take a reading between two blocks, if readings are not taken beside them."""
        if self._reader is not None:
            self._reader.look()

    def end(self) -> None:
        """Stop reading: the last block is done. A second time it does nothing."""
        if not self._watches:
            return
        self._watches, self._until = False, time.perf_counter()
        if self._reader is not None:
            self._readings, self._trouble = self._reader.end()

    def window(self, timing: Timing) -> Window:
        """Return what the device did during the blocks of a timing between the last `begin` and `end`."""
        if self._reader is None:
            return Window(note=self._note)
        return window_of(
            self._reader.source,
            [(begin, end) for _, begin, end in timing.blocks],
            sum(timing.times_us) * timing.notes.get("calls_per_sample", 1.0) / 1e6,
            self._readings,
            watched=(moment(self._since), moment(self._until)),
            alone=self._alone,
            trouble=self._trouble,
            limits=self._limits,
        )


def watch_cpu() -> Watch:
    """Return the watch of this machine's processor."""
    reader = CpuReader(allowed_cpus())
    if not reader.shows:
        return Watch(None, "Linux shows no frequency of this processor")
    return Watch(reader)


def watch_gpu(uuid: str, limits: Mapping[str, Any]) -> Watch:
    """Return the watch of a GPU that NVML knows, with what is known of it."""
    return Watch(NvmlReader(uuid), limits=limits)
