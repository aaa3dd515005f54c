"""Data and arithmetic: no torch, no Hydra, no MLflow."""
