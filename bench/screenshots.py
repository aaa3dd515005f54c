"""python bench/screenshots.py [FOLDER]: every picture of docs/comparing.md and docs/mlflow.md, from kept results.

Needs Chromium (/usr/bin/chromium, or CHROMIUM=PATH) and Playwright: pip install 'attn_exp[browser]'. Writes PNGs into
FOLDER, docs/pictures by default. MLflow's pages change: look at the pictures before you keep them.
"""

import html
import os
import pty
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from chromium import AS_A_USER_SETS_IT, chromium, new_page, served  # noqa: E402

RESULTS = ROOT / "results" / "h200"
# A GPU's sweep, as results/h200 keeps it, and another one, whose lengths grow.
SWEEP, CURVES = "table", "pick_proof"
LARGEST_BYTES = 200_000
PLOTS = (
    f"{CURVES}/lengths.png",
    *(f"multirun/{SWEEP}/plots/{name}.png" for name in ("heatmap", "roofline", "accuracy")),
)
ANSWER = re.compile("is fastest|too close to call")
# The page of a terminal.
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


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "LOGNAME": "you", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        home = Path(folder)
        prepare(home, environment)
        terminal(browser, home, environment, out)
        mlflow(browser, home, environment, out)
        report(browser, home / "multirun" / SWEEP / "report.html", out)
        for place in PLOTS:
            shutil.copy(home / place, out)
    for picture in sorted(out.glob("*.png")):
        # Not with a palette, which is a third as large and gives backends each other's colours.
        Image.open(picture).convert("RGB").save(picture, optimize=True)
        size = picture.stat().st_size
        print(f"{picture}: {size / 1e3:.0f} kB{'  TOO LARGE' if size > LARGEST_BYTES else ''}")


def prepare(home: Path, environment: Mapping[str, str]) -> None:
    """Both sweeps' records, plots and one report; one sweep in MLflow."""
    own = f"multirun/{SWEEP}"
    for kept in (f"backends/{SWEEP}", f"pick_proof/{CURVES}"):
        with tarfile.open(RESULTS / f"{kept}.tar.xz") as archive:
            archive.extractall(home / "multirun", filter="data")
    for words in (
        ("compare", SWEEP, "baseline=flash", f"out={own}/report.html", f"plots={own}/plots"),
        ("compare", CURVES, "where=batch == 4 and q_len > 1", "out=lengths.csv", f"plots={CURVES}"),
        ("log", SWEEP),
    ):
        subprocess.run([sys.executable, "-m", "attn_exp", *words], cwd=home, env=environment, check=True)


def terminal(browser: Any, home: Path, environment: Mapping[str, str], out: Path) -> None:
    """What the comparison prints; it begins as the end of a sweep does."""
    words = ("compare", SWEEP, "baseline=flash")
    command = (sys.executable, "-m", "attn_exp", *words)
    page = new_page(browser)
    page.set_content(terminal_page(f"attn-exp {' '.join(words)}", command, home, environment, lines=24))
    shot(page.locator("pre"), out / "terminal.png")


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


def mlflow(browser: Any, home: Path, environment: Mapping[str, str], out: Path) -> None:
    """A sweep's charts at the address that `attn-exp ui` prints, and its answer with one click; the list of sweeps."""
    page = new_page(browser)
    page.add_init_script(AS_A_USER_SETS_IT)
    with served(home, environment, SWEEP) as (charts, _):
        page.goto(charts)
        shown(page)
        shot(page, out / "mlflow_charts.png")
        page.get_by_role("link", name=SWEEP, exact=True).first.click()
        page.locator("strong", has_text=ANSWER).first.wait_for()
        page.wait_for_timeout(2000)
        shot(page, out / "mlflow_answer.png")
        page.get_by_role("link", name=re.compile("^triton")).first.click()
        page.get_by_role("heading", name=re.compile("^triton")).first.wait_for()
        page.wait_for_timeout(4000)
        shot(page, out / "mlflow_job.png")
    with served(home, environment) as (sweeps,):
        page.goto(sweeps)
        shown(page)
        cell = page.locator("[role=gridcell]", has=page.get_by_role("link", name=SWEEP, exact=True))
        cell.get_by_role("button").click()
        page.get_by_role("link", name=re.compile("^triton")).first.wait_for()
        page.wait_for_timeout(2000)
        shot(page, out / "mlflow_sweeps.png")


def shown(page: Any) -> None:
    """Wait for charts or rows, and close the note that this is a shared view."""
    page.get_by_text("viewing a shared view").wait_for()
    page.locator("[role=alert] button, [class*=alert] button").last.click()
    page.wait_for_timeout(5000)


def report(browser: Any, file: Path, out: Path) -> None:
    """The HTML report on a screen, light and dark, and on a telephone."""
    for name, scheme, width, height in (
        *(("report", "light", 1200, 900), ("report_dark", "dark", 1200, 900)),
        ("report_narrow", "light", 400, 860),
    ):
        page = new_page(browser, width, height, color_scheme=scheme)
        page.goto(f"file://{file}")
        shot(page, out / f"{name}.png")


def shot(what: Any, path: Path) -> None:
    what.screenshot(path=path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "pictures").resolve())
