"""Compare sweeps: which backend is faster where, by how much, and which differences are too small to tell."""

# Here, and not in `choice.py`, since `attn-exp compare --help` shows them and imports nothing else for it.
# The default margin: the difference that verdict `equivalent` rules out.
MARGIN = 0.03
# The formats of a report, and the ending of a file in each.
FORMATS = {"table": ".txt", "markdown": ".md", "csv": ".csv", "json": ".json", "latex": ".tex", "html": ".html"}
