"""The search for cases that a backend computes wrongly, in a process of its own, and what the command shows of it."""
