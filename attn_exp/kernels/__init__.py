"""This package's own kernels; importing them needs their compiler, Triton or Helion."""
