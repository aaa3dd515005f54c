"""The commands of `attn-exp`, a module each: their arguments, and what they print."""
