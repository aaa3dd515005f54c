"""Sweeps of many jobs: the sweeper, the composition of its jobs, and launchers that run them in tasks."""
