"""Kernels of this package's own; what imports them needs their compiler (Triton)."""
