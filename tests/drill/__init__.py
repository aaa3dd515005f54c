"""The fault drill: sweeps in which everything goes wrong that can, and a check that nothing was lost."""
