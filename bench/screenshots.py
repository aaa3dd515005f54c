"""python bench/screenshots.py [FOLDER]: a small CPU sweep, and pictures of it in MLflow's pages, for the README.

Needs Playwright (pip install playwright) and a Chromium (/usr/bin/chromium, or CHROMIUM=PATH). Writes PNGs of 1,400 by
900 into FOLDER, docs/pictures by default. MLflow's pages change: look at the pictures before you keep them.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SWEEP = "gpt2-small"
COMMAND = (
    *("-m", "backend=flash,math,eager", "batch=1,2", "seq_len=128,256", "device=cpu", f"sweep={SWEEP}"),
    *("stopping.budget_s=0.2", "stopping.precision=0.02"),
)
CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
# MLflow opens a panel of its own over a quarter of the window on the first visit.
NO_PANEL = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
LARGEST_BYTES = 300_000
_JOBS = 12


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "attn_exp", *COMMAND], cwd=folder, env=environment, check=True)
        command = [sys.executable, "-m", "attn_exp.ui", f"--port={free_port()}"]
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = [server.stdout.readline().strip() for _ in range(2)][1]
            assert address.startswith("http://"), address
            take(address, out)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    for picture in sorted(out.glob("*.png")):
        size = picture.stat().st_size
        print(f"{picture}: {size / 1e3:.0f} kB{'  TOO LARGE' if size > LARGEST_BYTES else ''}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take(address: str, out: Path) -> None:
    with sync_playwright() as playwright:
        binary = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=binary, args=list(CHROMIUM))
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(60_000)
        page.add_init_script(NO_PANEL)
        run_list(page, address, out / "runs.png")
        comparison(page, out)
        page.goto(address)
        expand(page)
        one_run(page, out)
        browser.close()


def expand(page: Page) -> None:
    """Open the sweep, so that its jobs stand under it."""
    page.get_by_role("link", name=SWEEP, exact=True).wait_for()
    page.locator(".ag-cell [class*=expander], .ag-cell [role=button]").first.click()
    page.get_by_role("link", name="flash · b1").first.wait_for()


def run_list(page: Page, address: str, path: Path) -> None:
    page.goto(address)
    expand(page)
    close_note(page)
    page.wait_for_timeout(1500)
    page.screenshot(path=path)


def close_note(page: Page) -> None:
    """Close the note that this is a shared view."""
    note = page.get_by_role("button", name="close")
    if note.count():
        note.first.click()


def comparison(page: Page, out: Path) -> None:
    boxes = page.locator(".ag-pinned-left-cols-container .ag-selection-checkbox input")
    for index in range(1, boxes.count()):
        boxes.nth(index).check(force=True)
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Parallel Coordinates Plot").first.wait_for()
    page.wait_for_timeout(4000)
    page.screenshot(path=out / "compare.png")


def one_run(page: Page, out: Path) -> None:
    page.get_by_role("link", name="flash · b2 h12 s256").first.click()
    page.get_by_text("Metrics").first.wait_for()
    page.wait_for_timeout(3000)
    page.screenshot(path=out / "run.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "pictures").resolve())
