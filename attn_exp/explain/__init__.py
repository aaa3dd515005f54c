"""Explain a job on one page: what ran, for how long, what limits it, and which backend is faster."""
