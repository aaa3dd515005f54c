"""The parent process of one command: session, job queue, worker process, GPUs, progress."""
