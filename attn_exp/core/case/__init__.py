"""The case: the problem, its fields, its work, and filters over cases."""
