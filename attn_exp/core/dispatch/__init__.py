"""The dispatch table: the fastest backend of each bucket of shapes."""
