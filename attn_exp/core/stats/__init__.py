"""Statistics of samples and rounds. Uses only the standard library."""
