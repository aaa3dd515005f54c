"""Rotary position embedding (RoFormer, arXiv:2104.09864) with adjacent pairs, as in FLUX and Meta's llama."""

import torch


def rotary_tables(length: int, dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Return cosines and sines, (2, length, 1, dim / 2) in float32, the same numbers for every precision."""
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).float().unsqueeze(2)


def rotate(x_bshd: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of dimensions by its position's angle, in at least float32; the result has x's dtype."""
    cos, sin = tables[:, : x_bshd.shape[1]]
    wide = torch.promote_types(x_bshd.dtype, torch.float32)
    even, odd = x_bshd.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x_bshd.dtype)
