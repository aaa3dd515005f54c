"""attn_exp: which attention implementation is fastest here, by how much, and can the number be trusted?"""

# First the package `attn_exp.compare`: a later first import of one of its modules would rebind the name `compare`.
import attn_exp.compare  # noqa: F401
from attn_exp.api import compare, load
from attn_exp.core.version import __version__

__all__ = ["__version__", "compare", "load"]
