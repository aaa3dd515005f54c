"""Whether one kind of call takes longer than another, by single times of both in random order."""

from collections.abc import Sequence

# A call is longer if it takes more than another one by so much: a factor, and microseconds by device.
_LONGER, _MARGIN_US = 1.1, {"cuda": 3.0, "cpu": 20.0}
# So many calls of both kinds are enough to tell: of 24 x 24 pairs 92 % are five standard deviations from a half (Mann
# and Whitney's test).
MOST, _SHARE = 24, 0.92


def is_longer(one_us: float, other_us: float, device: str) -> bool:
    """Whether a call on a device, `cpu` or `cuda`, takes longer than another one by more than a margin."""
    return one_us > _LONGER * other_us + _MARGIN_US[device]


def nearly_all_longer(several_us: Sequence[float], others_us: Sequence[float], device: str) -> bool:
    """Whether calls take longer than others in nearly all pairs."""
    pairs = [is_longer(one, other, device) for one in several_us for other in others_us]
    return sum(pairs) > _SHARE * len(pairs)
