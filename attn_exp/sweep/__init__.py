"""Many jobs: the sweeper, the product of choices, and launchers."""
