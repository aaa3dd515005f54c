"""The child process that measures."""
