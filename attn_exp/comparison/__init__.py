"""Compare sweeps: which backend is faster where, by how much, and which differences are too small to tell."""

# Here, and not in `choice.py`, since `attn-exp compare --help` shows them and imports nothing else for it.
# The default margin: the difference that verdict `equivalent` rules out.
MARGIN = 0.03
# The forms in which the table of an answer may show a time.
SHOWN = ("auto", "tflops", "us", "gb/s")
# The reactions of a gate to differences that intervals leave open.
UNDECIDED = ("fail", "warn", "pass")
