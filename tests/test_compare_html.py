"""The HTML report: whole, readable without scripts and network, and nothing in it that a record could smuggle in."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import sweeps

from attn_exp import compare
from attn_exp.commands.compare import main
from attn_exp.comparison.pages import page
from attn_exp.core.record.record import Kernel
from attn_exp.core.sheet.render import text_of
from attn_exp.execution.closing import plots_and_curves, ranked_rivals, write_report
from attn_exp.plots.all import pictures

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</style></svg><svg onload=alert(1)>",
    "a'b\"c&d $\\frac{1}{0}$ --> ]]> {{x}}",
)
# What a page of ours may consist of; `use`, `path` and the like are matplotlib's.
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "nav",
        "a",
        "b",
        "section",
        "span",
        "div",
        "table",
    ),
    *("thead", "tbody", "tr", "th", "td", "pre", "ul", "li", "figure", "figcaption", "h3", "header", "main", "script"),
    *("svg", "defs", "g", "path", "use", "text", "tspan", "clippath", "rect", "image"),
}


class Reader(HTMLParser):
    """Collects tags, attributes, texts, and the cells of each table."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.tables, self.scripts = set(), [], [], [], []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._in = tag
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        self.text.append(data)
        if self._in in ("td", "th"):
            self.tables[-1][-1][-1] += data.strip("\n")
        if self._in == "script":
            self.scripts.append(data)


def records(word=""):
    found = []
    for index, (backend, factor) in enumerate((("flash", 1.0), ("cudnn", 0.7), (word or "eager", 2.0))):
        for length in (512, 1024):
            job = sweeps.job(backend, 100.0 * factor * length / 512, of=sweeps.case(seq_len=length), flags=("drift",))
            passes = {
                name: replace(one, kernels=(Kernel(name=f"{word}k{index}", count=1, time_us=1),), took=word or None)
                for name, one in job.passes.items()
            }
            job = replace(job, passes=passes, request=replace(job.request, job=f"{index}-{length}", model=word or "m"))
            environment = sweeps.H200 | ({"gpu": f"NVIDIA H200 {word}", "host": word} if word else {})
            found.append(replace(job, environment=environment))
    lost = sweeps.failed("error", "math", word or "no kernel for it")
    return [*found, replace(lost, request=replace(lost.request, job="9"))]


def report(tmp_path, monkeypatch, *words):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "folder=.", "out=r.html"]) == 0
    return (tmp_path / "r.html").read_text()


def test_it_is_one_file_that_fetches_nothing_and_runs_only_its_own_script(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    sweeps.write(tmp_path / "a", records())
    text = report(tmp_path, monkeypatch, "a", "baseline=flash")
    found = Reader(text)
    assert found.tags <= TAGS
    policy = next(value for tag, name, value in found.attributes if (tag, name) == ("meta", "content"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    (script,) = found.scripts
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    for _, name, value in found.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "xlink:href"):
            assert value.startswith(("#", "data:image/png;base64,")), value
    assert not re.search(r"(url\(|@import|src=)['\"]?http", text)


def test_the_answer_comes_first_then_the_warnings_then_plots_then_rows(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    sweeps.write(tmp_path / "a", records())
    (tmp_path / "a" / "command.txt").write_text("python -m attn_exp -m backend=flash,<b> tracker.uri=http://u:pw@h\n")
    text = report(tmp_path, monkeypatch, "a", "sort=-time_us")
    found = " ".join(Reader(text).text)
    said = compare(tmp_path / "a").answer.headline()
    failed = "1 of 7 jobs have no result (1 error)"
    order = [*said, "fastest, or too close", "Speed relative to the best", "TFLOPS against", failed, "made by:"]
    places = [found.index(one) for one in (*order, "<b> tracker.uri=", "attn-exp compare a sort=-time_us folder=.")]
    assert said and places == sorted(places)
    assert "pw@" not in text
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections[:2] == ["answer", "charts"] and sections[-3:] == ["d0", "d1", "d2"]
    # What nothing can be said about begins with that.
    lone = [one for one in records() if one.request.backend["name"] == "flash"]
    sweeps.write(tmp_path / "b", lone)
    assert 'class="answer"' not in report(tmp_path, monkeypatch, "b")


def test_tables_are_whole_without_scripts_and_numbers_stand_to_the_right(tmp_path, monkeypatch):
    sweeps.write(tmp_path / "a", records())
    text = report(tmp_path, monkeypatch, "a", "baseline=flash")
    own = page(compare(tmp_path / "a", baseline="flash"))
    rows = next(table for table in Reader(text).tables if "TFLOPS" in table[0])
    heads, *cells = rows
    assert len(cells) == len(own.sheets[0].rows) == 14
    for texts, row in zip(cells, own.sheets[0].texts(), strict=True):
        assert texts == [row[head] for head in heads]
    assert re.search(r'<th scope="col" class="num">us</th>', text)
    assert "position: sticky" in text and "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_flags_statuses_reasons_and_environments_are_in_it(tmp_path, monkeypatch):
    sweeps.write(tmp_path / "a", records())
    changed = [replace(one, environment=one.environment and sweeps.H200 | {"driver": "590"}) for one in records()]
    sweeps.write(tmp_path / "b", changed)
    text = report(tmp_path, monkeypatch, "b", "against=a")
    tables = {table[0][0]: table for table in Reader(text).tables}
    assert tables["flag"][1][:2] == ["drift", "6"] and "differs from the first" in tables["flag"][1][2]
    assert ["error", "math", "1", "no kernel for it"] in tables["status"]
    assert tables["environment"][0] == ["environment", "a", "b"]
    # What differs comes first, and stands out.
    assert tables["environment"][1] == ["driver", "580.1", "590"]
    assert '<tr class="open"><td>driver' in text
    assert "drift: the last third" not in text  # said once, in its table


@pytest.mark.parametrize("word", HOSTILE)
def test_words_of_records_are_text_and_nothing_else(tmp_path, monkeypatch, word):
    pytest.importorskip("matplotlib")
    sweeps.write(tmp_path / "a", records(word))
    sweeps.write(tmp_path / "b", [replace(one, environment=sweeps.H200) for one in records(word)])
    for words in (("a",), ("b", "against=a", "anyway=true")):
        text = report(tmp_path, monkeypatch, *words)
        found = Reader(text)
        assert found.tags <= TAGS
        assert len(found.scripts) == 1
        assert not [name for _, name, _ in found.attributes if name.startswith("on")]
        assert all(value.startswith(("#", "data:image/png")) for _, name, value in found.attributes if "href" in name)
        if "<" in word:
            assert word not in text
        assert word in "".join(found.text)


def test_without_matplotlib_the_tables_are_there_and_a_sentence_says_what_is_missing(tmp_path, monkeypatch, capsys):
    sweeps.write(tmp_path / "a", records())
    monkeypatch.setattr("attn_exp.plots.style.importlib.util.find_spec", lambda name: None)
    text = report(tmp_path, monkeypatch, "a")
    assert "<svg" not in text and "flash" in text
    assert capsys.readouterr().err == (
        "the report is without plots: plots need matplotlib, which is not installed: pip install matplotlib\n"
        "r.html is written\n"
    )
    assert main(["a", "folder=.", "plots=p"]) == 2
    assert "pip install" in capsys.readouterr().err


def test_a_sweep_s_own_report_shows_each_title_once(tmp_path):
    """Its plots are files, with titles and captions inside; those of the report are for screen readers."""
    found = sweeps.sweep(tmp_path / "s", [sweeps.job("flash", 100.0), sweeps.job("cudnn", 90.0)])
    rivals = ranked_rivals(found, print)
    plots = [path for path in plots_and_curves(found, rivals, print)[0] if path.stem == "heatmap"]
    (report,) = write_report(rivals, plots, tmp_path / "s", print)
    text = report.read_text()
    assert text.count("<figure>") == text.count('<figcaption class="unseen"><h3>') == 1
    assert text.count("Speed relative to the best") == 1
    assert re.search(r"\.unseen \{[^}]*clip-path", text)
    assert '<figcaption class="unseen">' not in text_of(page(rivals), "html", pictures=pictures(rivals))
