"""The parent process of a run or a duel: its context, its jobs, the worker process, GPUs and progress."""
