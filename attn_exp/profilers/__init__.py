"""Profilers: what runs in a job and why it takes its time, after timing."""
