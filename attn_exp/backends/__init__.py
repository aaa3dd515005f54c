"""Backends: each turns a case and its inputs into calls. One Python file and one YAML in `conf/backend/` each."""
