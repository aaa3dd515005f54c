"""Debian's Chromium, driven by Playwright, and MLflow's pages as `attn-exp ui` serves them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Letters in greys: their coloured edges would be most of a picture's size.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-lcd-text")
# On a first visit MLflow opens a panel over a quarter of the window, and its pages for language models.
AS_A_USER_SETS_IT = """
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')
localStorage.setItem('mlflow.workflowType_v1', '"machine_learning"')
"""
_PATIENCE_MS = 60_000


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """The browser at /usr/bin/chromium, or at CHROMIUM."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        binary = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=binary, args=list(FLAGS))
        yield browser
        browser.close()


def new_page(browser: "Browser", width: int = 1400, height: int = 900, **context: Any) -> Any:
    """A page of this size in pixels, in a session of its own."""
    page = browser.new_context(viewport={"width": width, "height": height}, **context).new_page()
    page.set_default_timeout(_PATIENCE_MS)
    return page


@contextlib.contextmanager
def served(folder: Path, environment: Mapping[str, str], *words: str) -> Iterator[list[str]]:
    """The addresses that `attn-exp ui` prints, while its server runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "attn_exp", "ui", *words, f"port={port}"]
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = []
        while (line := server.stdout.readline().strip()) and not line.startswith("Ctrl-C"):
            lines.append(line)
        addresses = [word for line in lines[1:] for word in line.split() if word.startswith("http")]
        assert addresses, lines
        yield addresses
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
