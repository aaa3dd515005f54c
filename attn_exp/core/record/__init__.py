"""The record: what one job leaves, its file, statuses, flags and metrics."""
