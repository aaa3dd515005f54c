"""Compare sweeps: which backend is faster where, by how much, and which differences are too small to tell."""

# The default margin: the difference that verdict `equivalent` rules out.
MARGIN = 0.03
# The forms in which the table of an answer may show a time.
SHOWN = ("auto", "tflops", "us", "gb/s")
