"""MLflow's pages in Chromium, at the addresses that a sweep and `attn-exp ui` print."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import sweeps
from chromium import AS_A_USER_SETS_IT, new_page, served

from attn_exp.core.catalogue import about_backend

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"}
SWEEP = ("-m", "backend=math,flash", "seq_len=64", "device=cpu", "sweep=first", "stopping.budget_s=0.1")
# Each is the fastest somewhere, so that the answer has several lines.
MADE = {"flash": (1.0, 3.0), "cudnn": (1.2, 0.7), "efficient": (2.0, 2.0)}
IN_SIGHT = """one => {
  const box = one.getBoundingClientRect();
  const found = document.elementFromPoint(box.left + 5, box.bottom - 3);
  return one === found || one.contains(found) || found.contains(one) && found.tagName !== 'HTML';
}"""


def attn_exp(home, *words):
    done = subprocess.run(
        [sys.executable, "-m", "attn_exp", *words], cwd=home, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a made-up sweep in MLflow: three backends on eight cases."""
    folder = tmp_path_factory.mktemp("mlflow")
    records = [
        sweeps.job(backend, 0.1 * length * batch * factors[length > 2048], of=sweeps.case(batch=batch, seq_len=length))
        for backend, factors in MADE.items()
        for batch in (1, 4)
        for length in (512, 1024, 4096, 8192)
    ]
    sweeps.write(folder / "multirun" / "made", records)
    attn_exp(folder, "log", "made")
    return folder


def page_at(browser, address):
    page = new_page(browser)
    page.add_init_script(AS_A_USER_SETS_IT)
    page.goto(address)
    return page


def test_a_sweep_s_answer_is_one_click_from_the_address_that_it_leads_to(browser, home):
    printed = attn_exp(home, *SWEEP)
    # The command that the sweep printed, and the first address that this one prints.
    (command,) = re.findall(r"look at them with: (attn-exp ui .*)", printed)
    with served(home, ENVIRONMENT, *shlex.split(command)[2:]) as (charts, answer):
        page = page_at(browser, charts)
        page.get_by_role("link", name="first", exact=True).click()
        said = page.locator("strong").first
        said.wait_for()
        assert page.url.partition("?")[0] == answer
        assert said.evaluate(IN_SIGHT)
        words = " ".join(said.inner_text().split())
    assert re.search("is fastest|too close to call", words)
    assert words in " ".join(printed.split())


def test_the_charts_are_the_sweep_s_own_in_its_backends_colours(browser, home):
    with served(home, ENVIRONMENT, "made") as (charts, _):
        page = page_at(browser, charts)
        bars = page.locator(".barlayer path")
        bars.first.wait_for()
        page.get_by_text("forward/time_us").first.wait_for()
        page.wait_for_function("document.querySelectorAll('.barlayer').length >= 2")
        fills = bars.evaluate_all("paths => paths.map(one => getComputedStyle(one).fill)")
        wanted = {colour(backend) for backend in MADE}
        assert wanted <= set(fills)
        assert page.get_by_text("first", exact=True).count() == 0
        page.get_by_role("link", name="made", exact=True).click()
        answer = page.locator("strong")
        answer.first.wait_for()
        # MLflow folds a long description, and fades what is just above the fold; the answer is above it.
        fold = page.get_by_text("Show more", exact=True).first.bounding_box()["y"]
        boxes = [one.bounding_box() for one in answer.all()]
        assert answer.first.evaluate(IN_SIGHT) and len(boxes) == 2
        assert all(box["y"] + box["height"] < fold - 20 for box in boxes)


def colour(backend):
    red, green, blue = bytes.fromhex(str(about_backend(backend).colour).removeprefix("#"))
    return f"rgb({red}, {green}, {blue})"


def test_jobs_are_found_by_shape_and_compared_by_parallel_coordinates(browser, home):
    with served(home, ENVIRONMENT, "made") as (charts, _):
        page = page_at(browser, charts)
        page.locator(".barlayer path").first.wait_for()
        search = page.get_by_placeholder("metrics.rmse", exact=False)
        # As docs/mlflow.md has it, for a shape that was measured.
        search.fill("params.batch = '4' and params.seq_len = '4096' and metrics.`forward/rank` = 1")
        search.press("Enter")
        page.get_by_text("1 matching run", exact=False).wait_for()
        assert page.get_by_role("link", name="cudnn s4096 b4", exact=False).count() == 1
        search.fill("tags.`attn_exp.sweep` = 'made' and tags.`attn_exp.kind` = 'job'")
        search.press("Enter")
        page.get_by_text("24 matching runs").wait_for()
        page.locator("input[type=checkbox]").first.click(force=True)
        page.get_by_role("button", name="Compare").first.click()
        page.get_by_text("Parallel Coordinates Plot").wait_for()
        page.locator(".parcoords .axis-title").first.wait_for()
        assert page.locator(".parcoords .axis-title", has_text="backend").count() >= 1
