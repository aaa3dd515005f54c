"""python bench/report_axe.py REPORT.html AXE.JS: axe-core's rules on an HTML report; exits with 1 for a violation.

Asked in light and dark, 1,400 and 400 pixels wide, with a table sorted and filtered; and that the page has no
horizontal scroll bar. Needs Playwright (pip install playwright), a Chromium (/usr/bin/chromium, or CHROMIUM=PATH), and
axe-core's package/axe.min.js (npm pack axe-core). Colour contrast takes minutes on a report of hundreds of cases.
"""

import os
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


def main(report: Path, axe: Path) -> int:
    found = 0
    with sync_playwright() as playwright:
        binary = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=binary, args=list(CHROMIUM))
        for scheme in ("light", "dark"):
            for width in (1400, 400):
                found += judged(browser, report, axe.read_text(), scheme, width)
        browser.close()
    return 1 if found else 0


def judged(browser: Browser, report: Path, axe: str, scheme: str, width: int) -> int:
    """Print what axe-core says of one way to show the report; return the number of violations."""
    # The page's policy forbids scripts but its own.
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        bypass_csp=True,
    )
    page = context.new_page()
    page.set_default_timeout(600_000)
    began = time.perf_counter()
    page.goto(f"file://{report.resolve()}")
    loaded_s = time.perf_counter() - began
    sorts = page.locator("#s0 thead th.sorts button")
    sorts.last.click()
    page.locator("#s0 thead input").first.fill("1")
    sorted_heads = page.locator("#s0 th[aria-sort=ascending]").count()
    wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.evaluate(axe)
    result = page.evaluate("axe.run()")
    print(
        f"{scheme}, {width} pixels: loaded in {loaded_s:.1f} s, {len(result['passes'])} rules pass, "
        f"{len(result['violations'])} violations, {sorted_heads} sorted head{', TOO WIDE' if wide else ''}"
    )
    for one in result["violations"]:
        print(f"  {one['id']} ({one['impact']}): {len(one['nodes'])} times, first {one['nodes'][0]['html'][:160]}")
    context.close()
    return len(result["violations"]) + wide + (sorted_heads != 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
