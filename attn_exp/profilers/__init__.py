"""Profilers: what runs in a job and why it takes so long, found after the timing."""
