"""Sheets: tables and pages of any kind, as text, Markdown, CSV, JSON or HTML."""

# The formats of a page, and the ending of a file in each. Here, since `--help` shows them and imports nothing else.
FORMATS = {"table": ".txt", "markdown": ".md", "csv": ".csv", "json": ".json", "html": ".html"}
