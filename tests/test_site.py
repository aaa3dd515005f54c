"""attn-exp site: histories as files that need no server, marked only where the sweeps prove a change."""

import html
import random
import re
import shutil
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import sweeps

from attn_exp.cli import COMMANDS
from attn_exp.commands.complete import answer
from attn_exp.commands.site import main
from attn_exp.core.record_file import VERDICTS_NAME
from attn_exp.core.request import DUEL_NAME

VALUES = [100.0, 100.4, 99.7, 100.1, 100.2, 105.1, 104.8, 105.3, 105.0, 105.2]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


def nights(home, values=VALUES, backend="flash", of=sweeps.CASE, start=0, **changes_at):
    """A sweep a night with one cell each; `changes_at` are changes of the environment from a night on: `n5={...}`."""
    environment = sweeps.H200
    for index, us in enumerate(values):
        environment = environment | changes_at.get(f"n{index}", {})
        at = sweeps.NOON + 86400 * (index + start)
        job = sweeps.job(backend, us, None, of=of, environment=environment, finished_at=at)
        sweeps.write(home / f"night{index + start:02}", [job])


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        of = dict(attrs)
        if tag == "a" and "#" not in of["href"]:
            self.links.append(of["href"])
        self.loads += [
            value for name, value in attrs if name in ("src", "srcset") or (tag == "link" and name == "href")
        ]


def site(folder):
    """The HTML of each page, whose links lead to pages, and which loads nothing."""
    pages = {path.name: path.read_text() for path in folder.iterdir()}
    for text in pages.values():
        found = Links()
        found.feed(text)
        assert set(found.links) <= set(pages) and not found.loads
        assert "default-src 'none'" in html.unescape(text)
    return pages


def charts(text):
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def titles(text):
    return [one.text for svg in charts(text) for one in svg.iter("{http://www.w3.org/2000/svg}title")]


def test_a_change_of_level_is_marked_with_what_changed_and_noise_is_not(tmp_path, capsys):
    home = tmp_path / "multirun"
    changes = {"n5": {"driver": "590"}, "n7": {"versions": {"torch": "2.12.0"}}}
    nights(home, **changes)
    draw = random.Random(2)
    nights(home, [100 + draw.gauss(0, 0.5) for _ in VALUES], "cudnn", sweeps.case(batch=8), **changes)
    assert main([]) == 0
    assert capsys.readouterr().out == "history/index.html is written: 10 sweeps, 2 cells, 1 changed level\n"
    pages = site(tmp_path / "history")
    assert len(pages) == 3
    turned = [name for name, text in pages.items() if any("from night05 on (p = " in one for one in titles(text))]
    (page,) = set(turned) - {"index.html"}
    (chart,) = charts(pages[page])
    said = titles(pages[page])
    assert sum("flash +5" in one and "driver 580.1 -> 590" in one for one in said) == 1
    assert "night05: driver 580.1 -> 590" in said and "night07: versions.torch 2.11.0 -> 2.12.0" in said
    assert any(re.fullmatch(r"night00 2026-03-01 12:00 UTC: flash 100\.0 \[99\.\d+, 100\.3\] time_us, .*H200", one)
               for one in said)  # fmt: skip
    assert len(chart.findall(".//{*}circle")) == len(VALUES) and len(chart.findall(".//{*}path")) == 1
    # The first page begins with what changed, and the other case has no mark.
    assert "of 2 cells: 1 changed level" in pages["index.html"] and len(charts(pages["index.html"])) == 1
    (calm,) = set(pages) - {page, "index.html"}
    assert not charts(pages[calm])[0].findall(".//{*}path") and "no change of level" not in pages[calm]
    assert pages["index.html"].index(page) < pages["index.html"].index(calm)


def test_each_gpu_has_its_own_curve_and_no_change_between_them(tmp_path, capsys):
    home = tmp_path / "multirun"
    other = {"gpu": "NVIDIA H100", "gpu_uuid": "GPU-2"}
    nights(home, [100.0] * 8 + [150.0] * 8, n8=other)
    assert main([]) == 0
    assert "16 sweeps, 2 cells, 0 changed level" in capsys.readouterr().out
    (page,) = set(site(tmp_path / "history")) - {"index.html"}
    text = (tmp_path / "history" / page).read_text()
    assert any("gpu NVIDIA H200 -> NVIDIA H100" in one for one in titles(text))
    assert len(charts(text)[0].findall(".//{*}polyline")) == 2
    assert "flash, NVIDIA H100" in text and "flash, NVIDIA H200" in text


@pytest.mark.parametrize("count", [1, 2])
def test_few_sweeps_make_a_site_that_says_so(tmp_path, count, capsys):
    nights(tmp_path / "multirun", VALUES[:count])
    assert main([]) == 0
    text = site(tmp_path / "history")["index.html"]
    assert f"{'one sweep' if count == 1 else '2 sweeps'}: a history needs 3 or more" in text
    assert "1 cells have fewer than 8 values, too few to detect a change of level" in text


def test_files_that_are_no_records_are_named_and_left_out(tmp_path, capsys):
    home = tmp_path / "multirun"
    nights(home, VALUES[:3])
    for place in ("night01/broken", "lost/broken"):
        (home / place).mkdir(parents=True)
        (home / place / "record.json").write_text("<b>{")
    duel = home / "duel-1"
    shutil.copytree(home / "night00", duel)
    (duel / DUEL_NAME).touch()
    (duel / VERDICTS_NAME).touch()
    (home / "empty").mkdir()
    assert main([]) == 3
    told = capsys.readouterr()
    assert "3 sweeps, 1 cells" in told.out
    assert told.err.count("skipped: ") == 2 and "multirun/lost/broken/record.json" in told.err
    text = site(tmp_path / "history")["index.html"]
    assert "multirun/night01/broken/record.json" in text and "multirun/lost/broken/record.json" in text
    assert "<b>" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to show, multirun has no sweep yet: give a folder of sweeps"),
        (["mutlirun"], "there is no folder mutlirun: did you mean 'multirun'? choose another"),
        (["bad"], "there is nothing to show, bad/night/x/record.json"),
        (["good/night00"], "good/night00 is one sweep: give the folder that it is in"),
        (["good", "metric=tme"], "tme"),
        (["good", "where=batch == 77"], "batch == 77"),
        (["good", "out=file"], "cannot write into file (File exists): choose another folder with out=FOLDER"),
        (["good", "bad"], "site takes one FOLDER, and 2 were given"),
        (["good", "ot=x"], "there is no option 'ot=': did you mean 'out'?"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, capsys, words, message):
    (tmp_path / "multirun").mkdir()
    (tmp_path / "bad/night/x").mkdir(parents=True)
    (tmp_path / "bad/night/x/record.json").write_text("{}")
    (tmp_path / "file").touch()
    nights(tmp_path / "good", VALUES[:1])
    assert main(words) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and told.out == ""
    assert len(told.err.splitlines()) == 1
    assert not (tmp_path / "history").exists()


def test_a_later_site_drops_pages_of_cases_that_are_no_more_and_nothing_else(tmp_path):
    nights(tmp_path / "multirun", VALUES[:3])
    nights(tmp_path / "multirun", VALUES[:3], "math", sweeps.case(batch=2))
    (tmp_path / "history").mkdir()
    (tmp_path / "history/mine.html").write_text("mine")
    (tmp_path / "history/case-mine.html").write_text("mine")
    assert main([]) == 0
    assert len(list((tmp_path / "history").iterdir())) == 5
    assert main(["where=batch == 2"]) == 0
    left = {one.name for one in (tmp_path / "history").iterdir()}
    assert len(left) == 4 and {"mine.html", "case-mine.html", "index.html"} <= left


def test_hundreds_of_records_take_seconds(tmp_path):
    cases = [sweeps.case(batch=1 + batch) for batch in range(10)]
    for night in range(8):
        at = sweeps.NOON + 86400 * night
        records = [
            sweeps.job(name, us, of=of, finished_at=at)
            for of in cases for name, us in (("flash", 100), ("cudnn", 80), ("math", 900))
        ]  # fmt: skip
        sweeps.write(tmp_path / "multirun" / f"night{night:02}", records)
    began = time.process_time()
    assert main([]) == 0
    assert time.process_time() - began < 5
    assert len(site(tmp_path / "history")) == 11


def test_the_tab_key_offers_folders(tmp_path):
    for name in ("multirun", "nightly"):
        (tmp_path / name).mkdir()
    (tmp_path / "note.txt").touch()
    assert answer("attn-exp site n", COMMANDS) == ["nightly/"]
    assert set(answer("attn-exp site nightly/ m", COMMANDS)) == {"metric=", "multirun/"}
