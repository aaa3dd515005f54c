"""Quantise: float32 numbers as e4m3 codes with one scale a tensor, number = code * scale."""

from dataclasses import dataclass

import torch

# The largest finite e4m3 (arXiv:2209.05433, table 1).
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Quantised:
    """Codes in `torch.float8_e4m3fn`, and the scale that they are multiplied by to be numbers."""

    codes: torch.Tensor
    scale: float

    def numbers(self) -> torch.Tensor:
        """What the codes mean, in float32."""
        return self.codes.float() * self.scale


def quantised(numbers: torch.Tensor, scale: float | None = None) -> Quantised:
    """Round float32 numbers to codes; without a `scale` the largest number gets the largest code (amax / 448)."""
    if scale is None:
        # A tensor of zeros fits any scale.
        scale = (numbers.abs().amax() / E4M3_MAX).item() or 1.0
    # Whether a cast saturates or makes NaN of what is too large, PyTorch's versions do not agree.
    return Quantised((numbers / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def rounded(numbers: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """The numbers as they come back from codes."""
    return quantised(numbers, scale).numbers()
