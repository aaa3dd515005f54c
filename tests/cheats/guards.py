"""Right on what benchmarks look at, and wrong on what models have: sinks, late outliers, small gradients, tails."""

from cheats.corpus import case_of

HALF = case_of(dtype="bfloat16", head_dim=64, value_dim=64, causal=True)
