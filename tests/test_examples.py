"""Run every example on a CPU; the sweep of the first one is read by the others."""

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import cli
import pytest
from inprocess import typed

from attn_exp import compare, load
from attn_exp.commands.compare import main as compare_main
from attn_exp.core.record.profile import profile_folder
from attn_exp.results.read import read_folder

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# The others have what their examples need.
TESTS = tuple(Path(__file__).with_name(f"test_{name}.py") for name in ("examples", "search", "pick"))
SMALL = tuple(word for word in cli.QUICK if not word.startswith(("batch=", "passes=")))


def ran(command, cwd, *path, codes=(0,)):
    """Return what a command printed. Its `python` is this one; `path` are further folders on its PYTHONPATH."""
    where = os.pathsep.join(map(str, [*path, ROOT]))
    path_variable = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=cli.environment() | {"PYTHONPATH": where, "PATH": path_variable},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the folder in which the first example made its sweep, `from_python`."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "printed.txt").write_text(ran([sys.executable, EXAMPLES / "first_sweep.py", *SMALL], folder))
    return folder


def test_every_example_is_listed_and_run_here():
    names = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    page, tests = (EXAMPLES / "README.md").read_text(), "".join(map(Path.read_text, TESTS))
    assert {name for name in names if f"({name}" not in page} == set()
    assert {name for name in names if f'"{name}"' not in tests} == set()


def test_a_first_sweep_from_python(home):
    assert {record.status for record in read_folder(home / "multirun" / "from_python").records()} == {"ok"}
    best = [
        line for line in (home / "printed.txt").read_text().splitlines() if line.startswith(("forward ", "backward "))
    ]
    assert {line.rpartition(": ")[2].split()[0] for line in best} <= {"flash", "math"}


def test_records_in_plain_python(home):
    output = ran([sys.executable, "-S", EXAMPLES / "plain_records.py", home / "multirun" / "from_python"], home)
    rows = list(csv.DictReader(output.splitlines()))
    assert len(rows) == 8
    assert {row["backend"] for row in rows} == {"flash", "math"}
    assert all(float(row["time_us"]) == pytest.approx(float(row["median_of_samples_us"])) for row in rows)


# Without MLflow and pictures, which the first example has: half of the time.
_PLAIN_RUN = """
import attn_exp
run = attn_exp.run
attn_exp.run = lambda *words, **more: run(*words, **more | {"tracker": "none", "save_plots": False})
"""
# Runs a notebook's cells in order, with as few rounds as may be, and says how each one's last value would be shown. Of
# rows that a busy machine measures badly there would be no heatmap.
_CELLS = """
import ast, json, sys
import attn_exp.results.cell
attn_exp.results.cell._WIDEST_COMPARED = float("inf")
space = {"__name__": "__main__"}
few = '"min_rounds": 2, "max_rounds": 2, "budget_s": 0.01'
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        *body, last = ast.parse("".join(cell["source"]).replace('"budget_s": 0.1', few)).body
        if not isinstance(last, ast.Expr):
            body, last = [*body, last], None
        exec(compile(ast.Module(body, []), "cell", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), space) if last else None
        forms = [form for form in ("_repr_html_", "_repr_svg_") if hasattr(value, form) and getattr(value, form)()]
        print("shown:", type(value).__name__, *forms, repr(value) if isinstance(value, tuple) else "")
"""


def test_the_notebook_s_cells_run_in_order(tmp_path):
    output = ran([sys.executable, "-c", _PLAIN_RUN + _CELLS, EXAMPLES / "notebook.ipynb"], tmp_path)
    shown = [line.split(maxsplit=3)[1:] for line in output.splitlines() if line.startswith("shown: ")]
    assert [one[:2] for one in shown] == [
        ["NoneType"], ["Sweep", "_repr_html_"], ["NoneType"], ["Chart", "_repr_svg_"], ["DataFrame", "_repr_html_"],
        ["PosixPath"], ["Timed", "_repr_html_"], ["tuple", "('inaccurate',"],
    ]  # fmt: skip
    assert (tmp_path / "report.html").is_file() and (tmp_path / "multirun" / "notebook").is_dir()


def test_the_notebook_was_run_and_none_of_its_cells_failed():
    cells = [c for c in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert set(kinds) == {"execute_result", "stream"} and len(kinds) >= len(cells) - 1


def test_the_gate_passes_and_fails_by_its_limit(home, tmp_path):
    gate = [EXAMPLES / "ci_gate.sh", "from_python", *SMALL, "batch=1"]
    ran([*gate], home, codes=(0, 1))
    (sweep,) = (home / "multirun").glob("gate-*")
    assert len(list(read_folder(sweep).records())) == 2
    assert "verdict" in (home / "gate.md").read_text()
    # The new sweep against copies of it, with times of which the gate must notice the first: half, and the same.
    for factor, code in ((0.5, 1), (1.0, 0)):
        base = tmp_path / f"base-{factor}"
        shutil.copytree(sweep, base)
        for folder, share in ((base, factor), (sweep, 1.0)):
            for path in folder.glob("*/record.json"):
                path.write_text(calm(path.read_text(), share))
        assert compare_main([str(sweep), f"against={base}", "fail_if_slower=3%", "spread=1%"]) == code
    made = ran([EXAMPLES / "ci_gate.sh", "fresh", *SMALL, "batch=1", "backend=math"], home)
    assert "fresh" in made and (home / "multirun" / "fresh").is_dir()


def calm(text, factor):
    """Return a record whose times are all near `factor` of 100 us, as on an idle machine."""
    tree = json.loads(text) | {"flags": []}
    for name, measured in tree["passes"].items():
        for timing in measured["timings"]:
            timing["times_us"] = [100 * factor * (1 + 0.001 * (i % 3)) for i in range(len(timing["times_us"]))]
        for key, time_us in (("time_us", 100.1), ("time_low_us", 100.0), ("time_high_us", 100.2)):
            if f"{name}/{key}" in tree["metrics"]:
                tree["metrics"][f"{name}/{key}"] = factor * time_us
    return json.dumps(tree)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder in which the package of custom_backend/ is installed."""
    source, target = tmp_path_factory.mktemp("source") / "custom_backend", tmp_path_factory.mktemp("target")
    shutil.copytree(EXAMPLES / "custom_backend", source)
    quiet = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    ran([sys.executable, "-m", "pip", "install", *quiet, "--target", target, source], source)
    assert (target / "sliced_attention" / "__init__.py").is_file()
    return target


@pytest.fixture(scope="module")
def beside(installed, tmp_path_factory):
    """Return a folder with a sweep of the package's backend next to one of ours, `yaml`."""
    folder = tmp_path_factory.mktemp("beside")
    choices = ("-m", "backend=sliced,math", "batch=1,2", *SMALL, "sweep=yaml")
    ran(
        [sys.executable, "-m", "attn_exp", "--config-dir", EXAMPLES / "custom_backend/conf", *choices],
        folder,
        installed,
    )
    return folder


def test_a_backend_of_another_package_is_measured_and_checked_like_ours(beside):
    records = list(read_folder(beside / "multirun" / "yaml").records())
    assert sorted(record.request.backend["name"] for record in records) == ["math", "math", "sliced", "sliced"]
    assert {(record.status, record.reason) for record in records} == {("ok", None)}
    (one,) = [r for r in records if r.request.backend["name"] == "sliced" and r.request.case.batch == 2]
    assert one.request.backend["rows"] == 32
    assert one.metrics["forward/error_out"] < 1e-5 and one.metrics["backward/error_dq"] < 1e-5
    assert statistics.median(one.passes["forward"].timings[0].times_us) == pytest.approx(one.metrics["forward/time_us"])
    table = (beside / "multirun" / "yaml" / "table.txt").read_text()
    assert table.count("sliced") == 2


def test_without_a_file_it_has_its_class_s_name_and_its_options(installed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr("attn_exp.worker.__main__.limit_memory", lambda: None)
    words = ("backend._target_=sliced_attention.SlicedAttention", "++backend.rows=16", "batch=1", *SMALL)
    assert typed(monkeypatch, tmp_path)(*words, "isolation=none", "sweep=target")[0] == 0
    (record,) = read_folder(tmp_path / "multirun" / "target").records()
    backend = record.request.backend
    assert (record.status, backend["name"], backend["rows"]) == ("ok", "slicedattention", 16)


def test_its_records_are_compared_without_the_package(beside, monkeypatch):
    monkeypatch.chdir(beside)
    rivals = compare(load("yaml"), baseline="math")
    assert {row.cell.result.label for row in rivals.rows} == {"sliced", "math"}
    assert all(row.cell.value is not None for row in rivals.rows)
    assert [mean.cases for mean in rivals.means if mean.label == "sliced"] == [2, 2]  # of each pass


def test_a_profiler_of_one_s_own(tmp_path):
    folder = EXAMPLES / "custom_profiler"
    choices = ("profiler=python_calls", "backend=eager", *SMALL, "batch=1", "passes=[forward]", "sweep=a")
    ran([sys.executable, "-m", "attn_exp", "--config-dir", folder / "conf", *choices], tmp_path, folder)
    (record,) = read_folder(tmp_path / "multirun" / "a").records()
    profile = record.profiles["python_calls"]
    assert (profile.status, profile.reason) == ("ok", None)
    assert profile.metrics["forward/calls"] >= 1
    assert any("formula" in kernel.name for kernel in profile.kernels)
    job = tmp_path / "multirun" / "a" / record.request.job
    assert (profile_folder(job, "python_calls") / "forward.txt").read_text()


def test_a_decoder_with_picks_and_without(tmp_path):
    # Beside other programs no row may be known well enough to be picked: then nothing is compared.
    code = f"{_PLAIN_RUN}import runpy, sys\nrunpy.run_path(sys.argv[1], run_name='__main__')"
    printed = ran([sys.executable, "-c", code, EXAMPLES / "decode_model.py"], tmp_path, codes=(0, 1))
    assert "tokens/s" not in printed or (printed.count(" tokens/s") == 2 and "x as fast [" in printed)
