"""python bench/screenshots.py [FOLDER]: a small CPU sweep, and pictures of it in MLflow's pages and our HTML report.

Needs Playwright and Pillow (pip install playwright pillow) and a Chromium (/usr/bin/chromium, or CHROMIUM=PATH).
Writes PNGs of 1,400 by 900 into FOLDER, docs/pictures by default. MLflow's pages change: look at the pictures before
you keep them.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SWEEP = "gpt2-small"
COMMAND = (
    *("-m", "backend=flash,math,eager", "batch=1,2", "seq_len=64,128,256", "device=cpu", f"sweep={SWEEP}"),
    *("stopping.budget_s=0.2", "stopping.precision=0.02"),
)
REPORT = (SWEEP, "baseline=math", "out=report.html")
CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
# On a first visit MLflow opens a panel over a quarter of the window, and its pages for language models.
AS_A_USER_SETS_IT = """
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')
localStorage.setItem('mlflow.workflowType_v1', '"machine_learning"')
"""
LARGEST_BYTES = 300_000


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "LOGNAME": "you"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "attn_exp", *COMMAND], cwd=folder, env=environment, check=True)
        subprocess.run([sys.executable, "-m", "attn_exp", "compare", *REPORT], cwd=folder, env=environment, check=True)
        with served(folder, environment) as address:
            take(address, Path(folder, "report.html"), out)
        with served(folder, environment, SWEEP) as address:
            one_sweep(address, out)
    for picture in out.glob("*.png"):
        # Pages have few colours: a palette makes a third of the file.
        Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)
    for picture in sorted(out.glob("*.png")):
        size = picture.stat().st_size
        print(f"{picture}: {size / 1e3:.0f} kB{'  TOO LARGE' if size > LARGEST_BYTES else ''}")


@contextlib.contextmanager
def served(folder: str, environment: dict[str, str], *words: str) -> Iterator[str]:
    """The first address that `attn-exp ui` prints, while its server runs."""
    command = [sys.executable, "-m", "attn_exp", "ui", *words, f"port={free_port()}"]
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = [server.stdout.readline().strip() for _ in range(2)][1]
        assert address.startswith("http://"), address
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


@contextlib.contextmanager
def opened() -> Iterator[Page]:
    with sync_playwright() as playwright:
        binary = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=binary, args=list(CHROMIUM))
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(20_000)
        page.add_init_script(AS_A_USER_SETS_IT)
        yield page
        browser.close()


def one_sweep(address: str, out: Path) -> None:
    """The charts of a sweep, and with one click its page, where its answer must stand."""
    with opened() as page:
        page.goto(address)
        page.get_by_text("forward/speedup").first.wait_for()
        close_note(page)
        page.wait_for_timeout(4000)
        page.screenshot(path=out / "charts.png")
        page.get_by_role("link", name=SWEEP, exact=True).first.click()
        page.locator("strong", has_text=re.compile("times as fast as|too close to call|NO PICK")).first.wait_for()
        page.wait_for_timeout(2000)
        page.screenshot(path=out / "answer.png")
        print(page.locator("strong").first.inner_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take(address: str, report_file: Path, out: Path) -> None:
    with opened() as page:
        run_list(page, address, out / "runs.png")
        comparison(page, out)
        page.goto(address)
        expand(page)
        one_run(page, out)
        report(page, report_file, out / "report.png")


def expand(page: Page) -> None:
    """Open the sweep, so that its jobs stand under it."""
    cell = page.locator("[role=gridcell]", has=page.get_by_role("link", name=SWEEP, exact=True))
    cell.get_by_role("button").click()
    page.get_by_role("link", name="flash s64 b1").first.wait_for()


def run_list(page: Page, address: str, path: Path) -> None:
    page.goto(address)
    expand(page)
    close_note(page)
    page.wait_for_timeout(1500)
    page.screenshot(path=path)


def close_note(page: Page) -> None:
    """Close the note that this is a shared view."""
    page.get_by_text("viewing a shared view").wait_for()
    page.locator("[role=alert] button, [class*=alert] button").last.click()


def comparison(page: Page, out: Path) -> None:
    """All jobs of the sweep side by side: MLflow's comparison of chosen runs."""
    search = page.get_by_placeholder("metrics.rmse").first
    search.fill("tags.`attn_exp.kind` = 'job'")
    search.press("Enter")
    page.wait_for_timeout(2000)
    if not page.get_by_role("link", name="flash s64 b1").count():
        expand(page)
    boxes = page.locator(".ag-pinned-left-cols-container .ag-selection-checkbox input")
    boxes.nth(1).wait_for(state="attached")
    for index in range(1, boxes.count()):
        boxes.nth(index).check(force=True)
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Parallel Coordinates Plot").first.wait_for()
    page.wait_for_timeout(2000)
    choose(page, "forward/time_us", "forward/tflops")
    page.wait_for_timeout(2000)
    page.screenshot(path=out / "compare.png")


def choose(page: Page, instead_of: str, name: str) -> None:
    """Take one name out of a list of the comparison, if it is there, and put another one in."""
    item = page.locator("[class*=select-selection-item]", has=page.get_by_text(instead_of, exact=True)).first
    box = page.locator("[class*=select-selector]", has=page.get_by_text(instead_of, exact=True)).first
    handle = box.element_handle()
    item.locator("[class*=item-remove]").click()
    handle.click(position={"x": 200, "y": 12})
    option = page.locator("[class*=select-item-option]:visible", has=page.get_by_text(name, exact=True)).first
    page.locator("[class*=select-dropdown]:visible").last.hover()
    for _ in range(50):
        if option.count():
            break
        page.mouse.wheel(0, 60)
        page.wait_for_timeout(50)
    option.click()
    page.keyboard.press("Escape")


def one_run(page: Page, out: Path) -> None:
    page.get_by_role("link", name="flash s256 b2").first.click()
    page.get_by_text("Metrics").first.wait_for()
    page.wait_for_timeout(2000)
    page.screenshot(path=out / "run.png")
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("record.json").first.click()
    page.wait_for_timeout(3000)
    page.screenshot(path=out / "artifacts.png")


def report(page: Page, file: Path, path: Path) -> None:
    """Our own report, with its tables and plots."""
    page.goto(f"file://{file}")
    # Both tables and plots in one picture.
    page.evaluate("document.body.style.zoom = 0.6")
    page.wait_for_timeout(500)
    page.screenshot(path=path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "pictures").resolve())
