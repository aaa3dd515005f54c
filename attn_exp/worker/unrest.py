"""Work and memory around calls whose bits are compared, so that a race gets a chance to show."""

import random
from collections import deque
from collections.abc import Iterable, Mapping

import torch

# Blocks of memory that stay while the next calls run, and the largest one of them.
_HELD, _LARGEST_BYTES = 3, 64 << 20
# The size of the matrices on the other stream, of which up to so many products run beside a call.
_SIDE, _MOST_PRODUCTS = 2048, 8


class Unrest:
    """Gives every call other memory, and on a GPU every other call a device that also computes something else.

    A result in memory of another address, which holds NaN, shows what a kernel reads and did not write. Work on another
    stream takes multiprocessors away, so that blocks of a kernel run in another order.
    """

    def __init__(self, likes: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._dice, self._device, self._likes = random.Random(), device, tuple(likes.values())
        self._held = deque[torch.Tensor](maxlen=_HELD)
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream()
            self._one, self._product = (torch.zeros(_SIDE, _SIDE, dtype=torch.bfloat16, device=device) for _ in "12")
            self._side.wait_stream(torch.cuda.current_stream())

    def before(self, call: int) -> None:
        """Change what the call of this number finds; nothing waits."""
        poison(self._likes, self._device)
        size = self._dice.randrange(1, min(_LARGEST_BYTES, max(like.nbytes for like in self._likes)) + 1)
        self._held.append(torch.full((size,), 0xFF, dtype=torch.uint8, device=self._device))
        if self._side is None or call % 2:
            return
        with torch.cuda.stream(self._side):
            for _ in range(self._dice.randint(1, _MOST_PRODUCTS)):
                torch.mm(self._one, self._one, out=self._product)

    def end(self) -> None:
        """Wait for the work on the other stream, and free the memory."""
        self._held.clear()
        if self._side is not None:
            self._side.synchronize()


def poison(likes: Iterable[torch.Tensor], device: torch.device) -> None:
    """Leave NaN in the memory that the next results will probably lie in: what a call does not write then shows."""
    for like in likes:
        if like.element_size() == 1:
            # The code of e4m3's NaN.
            torch.full(like.shape, 0x7F, dtype=torch.uint8, device=device)
        else:
            torch.full(like.shape, float("nan"), dtype=like.dtype, device=device)
