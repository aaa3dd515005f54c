"""Whether the timed calls did what they were timed for: their results, their work and when it was done."""
