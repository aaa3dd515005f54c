"""attn_exp: which attention implementation is fastest here, by how much, and can the number be trusted?"""

# First the packages `attn_exp.compare` and `attn_exp.run`: a later first import of one of their modules would rebind
# the names `compare` and `run`.
import attn_exp.compare
import attn_exp.run  # noqa: F401
from attn_exp.api import compare, load, run, time
from attn_exp.core.version import __version__

__all__ = ["__version__", "compare", "load", "run", "time"]
