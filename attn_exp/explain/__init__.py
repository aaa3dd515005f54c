"""Explain: one page about a job: what ran, for how long, what bounds it, and who is faster."""
