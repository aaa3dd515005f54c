"""Backends: each turns a case and its inputs into calls.

A backend is one Python file here and one YAML in `conf/backend/`.
"""
