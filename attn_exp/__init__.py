"""attn_exp: which attention implementation is fastest here, by how much, and can the number be trusted?"""

__version__ = "0.1.0"
