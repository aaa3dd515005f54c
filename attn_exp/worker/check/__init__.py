"""Whether results are right: of the first calls, of calls on hard values, and of blocks that were timed."""
