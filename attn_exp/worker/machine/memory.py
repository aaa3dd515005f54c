"""The memory of a call, as PyTorch's allocator counts it, and memory that only the driver knows."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from attn_exp.timers.call import Call

# PyTorch's CUDA allocator gives out multiples of this.
_ROUNDED = 512


class CudaMemory:
    """Counters of the current CUDA device's memory in bytes, after the work before a look at them.

    `taken` is what processes had of it before this one had any; None if that is unknown.
    """

    def __init__(self, taken: int | None = None) -> None:
        # This process holds its context. Memory that libraries take later counts as that of others.
        self._own = None if taken is None else max(0, self.outside() - taken)

    def of_others(self) -> tuple[int, int] | None:
        """Return how much other processes have taken, and how much there is; None if that is unknown."""
        return None if self._own is None else (max(0, self.outside() - self._own), torch.cuda.mem_get_info()[1])

    def allocated(self) -> int:
        """Return what PyTorch's allocator has given out."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most that it had given out since `reset_peak`."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Let the peak begin again."""
        torch.cuda.reset_peak_memory_stats()

    def outside(self) -> int:
        """Return what the driver has given out beyond what PyTorch's allocator holds, to any process."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


@dataclass(frozen=True)
class CallMemory:
    """The bytes that one call adds: at its `peak`, and `kept` as long as its result lives."""

    peak: int = 0
    kept: int = 0


def call_memory(memory: CudaMemory, call: Call) -> CallMemory:
    """Make a call by itself, and return the memory that it adds to what is there.

    No new inputs, copies of results or flush are part of it.
    """
    before = memory.allocated()
    memory.reset_peak()
    result = call()
    peak, kept = memory.peak() - before, memory.allocated() - before
    del result
    return CallMemory(peak, kept)


@dataclass
class OwnMemory:
    """Memory that a job holds and takes, to tell the memory of its calls from that of everything else.

    Attributes:
        resident: bytes that every call needs: inputs without d_out, and what the backend keeps.
        outside: bytes that the driver had given out to others before the backend took any.
        forward: the memory that a forward adds; None before one was measured.
    """

    memory: CudaMemory
    resident: int
    outside: int
    forward: CallMemory | None = None

    def look_at_forward(self, call: Call) -> CallMemory:
        """Make a forward and return what it adds, unless that is known."""
        self.forward = self.forward or call_memory(self.memory, call)
        return self.forward

    def of_pass(self, direction: str, call: Call) -> tuple[int, int]:
        """Return the bytes at the peak of a pass, and those of them that neither its result nor a later pass keeps.

        The peak of the backward includes what its forward saved.
        """
        if direction == "forward":
            added, saved = self.look_at_forward(call), 0
        else:
            added = call_memory(self.memory, call)
            saved = self.forward.kept if self.forward and direction == "backward" else 0
        return self.resident + saved + added.peak, added.peak - added.kept

    def outside_now(self) -> int:
        """Return the bytes outside of PyTorch's allocator that were taken since."""
        return max(0, self.memory.outside() - self.outside)


class Ledger:
    """Counts memory that a job takes while it is prepared, without that of judging; nothing on a CPU."""

    def __init__(self, memory: CudaMemory | None) -> None:
        self._memory = memory
        self._allocated, self._outside = self._now()

    @contextlib.contextmanager
    def others(self) -> Iterator[None]:
        """Exclude memory that is taken or freed inside."""
        before = self._now()
        try:
            yield
        finally:
            after = self._now()
            self._allocated += after[0] - before[0]
            self._outside += after[1] - before[1]

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as the job's, which share the memory of another one's."""
        places = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._allocated -= sum(math.ceil(size / _ROUNDED) * _ROUNDED for size in places.values())

    def own(self, d_out: torch.Tensor) -> OwnMemory | None:
        """Return what the job holds now: its inputs without `d_out`, and what the backend keeps."""
        if self._memory is None:
            return None
        of_d_out = math.ceil(d_out.nbytes / _ROUNDED) * _ROUNDED
        return OwnMemory(self._memory, self._memory.allocated() - self._allocated - of_d_out, self._outside)

    def _now(self) -> tuple[int, int]:
        return (0, 0) if self._memory is None else (self._memory.allocated(), self._memory.outside())
