"""The HTML report in Chromium: light, dark, narrow, printed, sorted, and judged by axe-core."""

import pytest
import sweeps
from chromium import new_page

from attn_exp.commands.compare import main

BACKENDS = {"flash": 1.0, "cudnn": 0.7, "efficient": 2.0, "math": 9.0}
LENGTHS = [128 * step for step in range(1, 27)]
WIDTHS = (1400, 400)
ROWS = "#s0 tbody tr"


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """A report of 104 cases, one of which takes a thousand times as long on one backend."""
    home = tmp_path_factory.mktemp("report")
    records = [
        sweeps.job(
            backend,
            (0.1 * length * factor * (1000 if (backend, batch, length) == ("math", 1, 128) else 1)) * batch,
            of=sweeps.case(batch=batch, seq_len=length, causal=causal),
            flags=("drift",) if backend == "cudnn" else (),
        )
        for backend, factor in BACKENDS.items()
        for batch in (1, 4)
        for causal in (False, True)
        for length in LENGTHS
    ]
    sweeps.write(home / "a", records)
    assert main(["a", f"folder={home}", "baseline=flash", f"out={home / 'report.html'}"]) == 0
    return home / "report.html"


def opened(browser, report, width=1400, **context):
    # The page's policy forbids scripts but its own, axe-core's too.
    page = new_page(browser, width, bypass_csp=True, **context)
    page.goto(f"file://{report}")
    return page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_core_finds_nothing_and_the_page_is_as_wide_as_the_window(browser, report, axe, scheme, width):
    page = opened(browser, report, width, color_scheme=scheme)
    page.locator("#s0 thead th.sorts button").last.click()
    page.locator("#s0 thead input").first.fill("s1280 ")
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    dark = sum(map(int, page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")))
    assert (dark < 3 * 64) == (scheme == "dark")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 20
    assert [(one["id"], one["nodes"][0]["html"][:160]) for one in found["violations"]] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_answer_is_in_sight_and_no_letter_is_small(browser, report, width):
    page = opened(browser, report, width)
    box = page.locator(".answer").bounding_box()
    assert box["y"] + box["height"] < 900
    sizes = page.evaluate(
        """[...document.querySelectorAll('body *')].filter((one) => [...one.childNodes].some(
             (node) => node.nodeType === 3 && node.textContent.trim()) && !['SCRIPT', 'STYLE'].includes(one.tagName))
           .map((one) => {
             const svg = one.closest('svg');
             const shown = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
             return [shown * parseFloat(getComputedStyle(one).fontSize), one.textContent.trim().slice(0, 40)];
           })"""
    )
    assert len(sizes) > 1000
    assert min(sizes)[0] >= 11, min(sizes)


def test_the_whole_head_sorts_with_an_arrow(browser, report):
    page = opened(browser, report)
    heads = page.locator("#s0 thead th")
    column = heads.all_inner_texts().index("us")
    head = heads.nth(column)

    def sorted_by():
        cells = page.locator(f"{ROWS}:not([hidden]) td:nth-child({column + 1})").all_inner_texts()
        arrow = head.locator("button").evaluate("one => getComputedStyle(one, '::after').content")
        return head.get_attribute("aria-sort"), arrow.strip('"').strip(), [float(cell) for cell in cells if cell]

    box = head.bounding_box()
    corners = [(2, 2), (box["width"] - 3, box["height"] - 3)]
    for corner, direction, arrow in zip(corners, ("ascending", "descending"), "\u25b2\u25bc", strict=True):
        head.click(position={"x": corner[0], "y": corner[1]})
        said, shown, values = sorted_by()
        assert (said, shown) == (direction, arrow)
        assert len(values) > 800 and values == sorted(values, reverse=direction == "descending")


def test_every_case_is_found_among_the_rows_and_in_the_plot(browser, report):
    page = opened(browser, report)
    assert page.locator("#s0 .count").inner_text() == "832 rows"
    by_head = dict(
        zip(page.locator("#s0 thead th").all_inner_texts(), page.locator("#s0 thead input").all(), strict=True)
    )
    by_head["batch"].fill("=4")
    by_head["seq_len"].fill("=3328")
    by_head["causal"].fill("yes")
    assert page.locator("#s0 .count").inner_text() == "8 of 832 rows"
    labels = page.locator(".plot svg").first.locator("text").all_text_contents()
    assert sum(label.startswith(("b1 ", "b4 ")) for label in labels) == 104


def test_paper_is_white_and_shows_all(browser, report, tmp_path):
    page = opened(browser, report, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.plot svg')).filter") == "none"
    assert not page.locator("nav").is_visible() and not page.locator("#s0 thead input").first.is_visible()
    cut = page.evaluate(
        """[...document.querySelectorAll('.table, .plot, pre')].filter((one) =>
             getComputedStyle(one).overflowX !== 'visible').length"""
    )
    assert cut == 0
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 without its margins
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
