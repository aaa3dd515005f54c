"""A backend, a timer and a metric from outside of the package: nothing else is edited for them to appear."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli import QUICK, environment
from matplotlib.lines import Line2D

from attn_exp.core.catalogue import MARKERS, About, backends, read_about, recorded_about, timers
from attn_exp.core.errors import UserError
from attn_exp.plots.style import Look, looks
from attn_exp.results.read import read_folder
from attn_exp.results.result import decode

BACKEND = """
import torch
from attn_exp.backends.base import DeclarativeBackend, calls_of
from attn_exp.backends.supports import Supports
from attn_exp.core.record.metrics import TimedPass, metric


@metric("us")
def doubled_time_us(timed: TimedPass) -> float:
    '''Twice the median time.'''
    return 2 * timed.summary.median_us


class Transposed(DeclarativeBackend):
    '''PyTorch's attention, called from elsewhere.'''

    supports = Supports(devices=("cpu",), dtypes=("float32",), grouped=False)

    def prepare(self, case, inputs):
        return calls_of(torch.nn.functional.scaled_dot_product_attention, inputs)
"""
TIMER = """
from attn_exp.timers.cpu import CpuTimer
from attn_exp.timers.loop import Block


class Microsecond(CpuTimer):
    name = "steady"

    def block(self, call, calls):
        super().block(call, 1)
        return Block([25_000.0] * calls)
"""
BACKEND_YAML = """# backend=transposed: PyTorch's attention, called from elsewhere.
_target_: elsewhere_backend.Transposed
name: transposed
about:
  packages: [msgspec]
  colour: "#123456"
  marker: "s"
"""
TIMER_YAML = """# timer=steady: 25 ms, whatever is called.
_target_: elsewhere_timer.Microsecond
name: steady
devices: [cpu]
also: []
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with both, and one run with them."""
    folder = tmp_path_factory.mktemp("outside")
    for name, text in (
        ("elsewhere_backend.py", BACKEND),
        ("elsewhere_timer.py", TIMER),
        ("conf/backend/transposed.yaml", BACKEND_YAML),
        ("conf/timer/steady.yaml", TIMER_YAML),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ran = attn_exp(folder, "backend=transposed", "timer=steady", "sweep=first", "causal=false", *QUICK)
    assert ran.returncode == 0, ran.stderr
    return folder, ran.stdout


def attn_exp(folder, *arguments):
    own = [] if "compare" in arguments else ["--config-dir", str(folder / "conf")]
    command = [sys.executable, "-m", "attn_exp", *arguments, *own]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def test_they_are_in_the_table_the_csv_and_the_record(outside):
    folder, out = outside
    assert "transposed" in out
    assert "timer steady" in " ".join(out.split())
    sweep = folder / "multirun" / "first"
    (row,) = csv.DictReader((sweep / "table.csv").read_text().splitlines())
    assert (row["backend"], row["timer"], row["status"]) == ("transposed", "steady", "ok")
    assert float(row["forward/time_us"]) == 25_000.0
    (path,) = sweep.glob("*/record.json")
    record = json.loads(path.read_text())
    assert "msgspec" in record["environment"]["versions"]
    assert "about" not in record["request"]["backend"]


def test_a_metric_is_one_function(outside):
    """Imported with the backend, it is in the record, in table.csv, and to be compared by."""
    folder, _ = outside
    (row,) = csv.DictReader((folder / "multirun" / "first" / "table.csv").read_text().splitlines())
    assert float(row["forward/doubled_time_us"]) == 50_000.0
    compared = attn_exp(folder, "compare", "first", "metric=doubled_time_us", "format=csv")
    assert compared.returncode == 0, compared.stderr
    rows = list(csv.DictReader(compared.stdout.splitlines()))
    assert {float(row["doubled_time_us"]) for row in rows} == {50_000.0}


def test_a_plot_has_the_colour(outside):
    folder, _ = outside
    (result,) = read_folder(folder / "multirun" / "first").results
    assert looks([result]) == {"transposed": Look("#123456", "s")}


def test_a_timer_from_elsewhere_has_a_name_of_its_own(outside):
    folder, _ = outside
    ran = attn_exp(folder, "timer=steady", "timer.name=cpu", "dry_run=true", *QUICK)
    assert ran.returncode == 2
    assert "timer.name=cpu is a timer of attn_exp: give your own timer another name" in ran.stderr
    ran = attn_exp(folder, "timer=steady", "timer.devices=[tpu]", "dry_run=true", *QUICK)
    assert "timer.devices=['tpu'] is no list of devices: write devices: [cuda], [cpu] or [cuda, cpu]" in ran.stderr


def test_the_backends_of_the_package_look_different_and_its_timers_name_their_devices():
    shown = [(about.colour, about.marker) for about in backends().values()]
    assert None not in {part for look in shown for part in look}
    assert len(set(shown)) == len(shown)
    assert all(set(timer.devices) <= {"cuda", "cpu"} for timer in timers().values())


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"colour": "red"}, 'backend.about.colour=red is not of the form #RRGGBB: write colour: "#0072B2"'),
        ({"marker": "circle"}, "backend.about.marker=circle is no marker: choose one of . , o v"),
        ({"packages": "torch"}, "backend.about does not fit"),
    ],
)
def test_an_about_that_does_not_fit_is_refused_before_a_run_and_ignored_in_a_record(about, sentence, outside):
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_about(about)
    assert recorded_about("transposed", about) == About()
    path = next((outside[0] / "multirun" / "first").glob("*/record.json"))
    record = json.loads(path.read_text())
    record["request"]["config"]["backend"]["about"] = about
    result = decode(json.dumps(record).encode(), path)
    (look,) = looks([result]).values()
    assert re.fullmatch("#[0-9A-F]{6}", look.colour)


def test_markers_are_those_of_matplotlib_and_of_the_page():
    assert {one for one in Line2D.markers if isinstance(one, str) and len(one) == 1 and one.strip()} == set(MARKERS)
    page = (Path(__file__).parent.parent / "docs" / "adding_a_backend.md").read_text()
    assert f"`{' '.join(MARKERS)}`".replace("|", "\\|") in page
