"""What a command prints on a terminal, as an HTML page with its colours."""

import html
import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS = 120
# The colours that our tables use: SGR codes and what they mean on a white page.
STYLES = {
    "1": "font-weight:700",
    "2": "color:#6b6b6b",
    "31": "color:#b3261e",
    "32": "color:#00674b",
    "33": "color:#7d5200",
    "36": "color:#00639b",
}
_SGR = re.compile(r"\x1b\[([\d;]*)m")
_OTHER = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]")
PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; display: inline-block; background: #fff; }
pre { margin: 0; padding: 18px 22px; font: 15px/1.4 "DejaVu Sans Mono", monospace; color: #1a1a1a; }
.prompt { color: #6b6b6b; }
</style><pre>%s</pre>"""


def terminal_page(shown: str, command: Sequence[str], folder: Path, environment: Mapping[str, str], lines: int) -> str:
    """Run a command on a terminal of its own; return a page with `shown` as its prompt and its first lines."""
    printed = on_a_terminal(command, folder, environment).splitlines()
    more = [f"... and {len(printed) - lines} more lines"] if len(printed) > lines else []
    body = "\n".join(coloured(line) for line in [*printed[:lines], *more])
    return PAGE % f'<span class="prompt">$ {html.escape(shown)}</span>\n{body}'


def on_a_terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    ours, theirs = pty.openpty()
    own = {**environment, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=folder, env=own, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL) as run:
        os.close(theirs)
        chunks = []
        try:
            while chunk := os.read(ours, 1 << 16):
                chunks.append(chunk)
        except OSError:  # the other side is closed
            pass
        os.close(ours)
    if run.returncode:
        raise RuntimeError(f"{command} ended with {run.returncode}")
    return _OTHER.sub("", b"".join(chunks).decode().replace("\r\n", "\n"))


def coloured(line: str) -> str:
    parts, opened = _SGR.split(line), False
    text = html.escape(parts[0])
    for codes, words in zip(parts[1::2], parts[2::2], strict=True):
        styles = [STYLES[code] for code in codes.split(";") if code in STYLES]
        text += "</span>" * opened + (f'<span style="{";".join(styles)}">' if styles else "") + html.escape(words)
        opened = bool(styles)
    return text + "</span>" * opened
