"""Compare sweeps: which backend is faster where, by how much, and which differences are too small to tell."""
