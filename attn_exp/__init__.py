"""attn_exp: which attention implementation is fastest here, by how much, and can the number be trusted?"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """For notebooks: `from attn_exp import load, compare`, imported when asked for; `compare` is a callable module."""
    if name in ("compare", "load"):
        module = importlib.import_module("attn_exp.compare")
        return module if name == "compare" else module.load
    raise AttributeError(f"module 'attn_exp' has no attribute '{name}'")
