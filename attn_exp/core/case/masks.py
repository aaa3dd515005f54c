"""The masks of a case: each kind says which keys a query sees, all of them between two edges.

The query's own key is the last one that it sees under a causal mask. A kind is the field of a case with its number, a
class here, and a file of that name in conf/mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Edge:
    """A key as a function of the query's own one: `own // step * step + shift`, and at least `least`."""

    shift: int = 0
    step: int = 1
    least: int | None = None

    def at(self, own: Any, maximum: Callable[[Any, int], Any] = max) -> Any:
        """Return the key of `own`, a number or, with `torch.clamp` as the maximum, a tensor."""
        key = own // self.step * self.step + self.shift
        return key if self.least is None else maximum(key, self.least)

    def total(self, begin: int, end: int, keys: int) -> int:
        """Return the sum of the keys, clamped to [0, keys], of all own ones from `begin` to before `end`."""
        least = min(self.least or 0, keys)
        return (end - begin) * least + self._above(end, least, keys) - self._above(begin, least, keys)

    def _above(self, end: int, least: int, keys: int) -> int:
        """Return the sum of how far the keys before `end`, clamped to `keys`, are above `least`."""
        step, shift, most = self.step, self.shift - least, keys - least
        # Steps from the first one above 0 are whole; from the first full one on they are `most`.
        first, full, last = -shift // step + 1, -((shift - most) // step), end // step
        rising = max(first, min(last, full))
        whole = step * (step * (rising * (rising - 1) - first * (first - 1)) // 2 + shift * (rising - first))
        whole += step * most * max(0, last - max(first, full))
        return whole + (end - last * step) * min(max(last * step + shift, 0), most)


@dataclass(frozen=True)
class Full:
    """Every query sees every key."""

    typed: ClassVar[str] = "full"

    @property
    def first(self) -> Edge | None:
        """The first key that a query sees, None for key 0."""
        return self._edges()[0]

    @property
    def end(self) -> Edge | None:
        """The key after the last one that a query sees, None for all keys."""
        return self._edges()[1]

    def _edges(self) -> tuple[Edge | None, Edge | None]:
        return None, None

    def __str__(self) -> str:
        return self.typed


class Causal(Full):
    """A query sees the keys up to its own."""

    typed = "causal"

    def _edges(self) -> tuple[Edge | None, Edge | None]:
        return None, Edge(1)


@dataclass(frozen=True)
class Numbered(Causal):
    """A causal mask that a number changes.

    Attributes:
        typed: its name in conf/mask.
        word: what labels call it.
        does: what it does to a causal mask.
        lacking: what a backend without it has not.
    """

    number: int
    word: ClassVar[str]
    does: ClassVar[str]
    lacking: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.typed} ({self.number})"


class Window(Numbered):
    """A query sees its own key and those before it, `number` keys in all."""

    typed, word, does, lacking = "window", "w", "slides along", "sliding window"

    def _edges(self) -> tuple[Edge | None, Edge | None]:
        return Edge(1 - self.number), Edge(1)


class Prefix(Numbered):
    """Every query also sees the first `number` keys."""

    typed, word, does, lacking = "prefix_lm", "prefix", "adds keys to", "prefix"

    def _edges(self) -> tuple[Edge | None, Edge | None]:
        return None, Edge(1, least=self.number)


class Chunk(Numbered):
    """A query sees only keys of its own chunk of `number` positions."""

    typed, word, does, lacking = "chunked", "chunk", "cuts", "chunks"

    def _edges(self) -> tuple[Edge | None, Edge | None]:
        return Edge(step=self.number), Edge(1)


class Block(Numbered):
    """A query also sees the later keys of its own block of `number` positions."""

    typed, word, does, lacking = "block_causal", "block", "adds keys to", "causal blocks"

    def _edges(self) -> tuple[Edge | None, Edge | None]:
        return None, Edge(self.number, step=self.number)


# The kinds with a number, by the field of a case that has it.
KINDS: dict[str, type[Numbered]] = {"window": Window, "prefix": Prefix, "chunk": Chunk, "block": Block}
EVERY = tuple(KINDS)
# The fields of a case whose mask has no number.
NO_NUMBER: dict[str, Any] = dict.fromkeys(KINDS)
