"""Compare: from records to a decision. Reads records, never torch, Hydra or MLflow at import."""
