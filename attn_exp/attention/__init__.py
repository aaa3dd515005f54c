"""The operator and its correctness: inputs, formula, float32 reference, tolerances."""
