"""The Python API: real exports with types, cheap to import, and short when printed."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import sweeps

import attn_exp

ROOT = Path(attn_exp.__file__).parent.parent
SNIPPET = """
import attn_exp
from attn_exp import compare, load

sweep = load("first")
reveal_type(sweep)
reveal_type(attn_exp.compare(sweep, baseline="flash"))
reveal_type(compare(sweep, "old", margin=0.05))
reveal_type(compare(["a", "b", "c"], history=True, where="causal"))
reveal_type(sweep.results[0].metrics)
reveal_type(attn_exp.run("backend=flash", batch=[1, 8]).answer)
compare(sweep, baselin="flash")
"""


def python(code, cwd=ROOT):
    ran = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


CHECKED = (("config-file", "pyproject.toml"), ("cache-dir", ".mypy_cache"))


def test_a_strict_type_checker_sees_the_functions_and_what_they_return(tmp_path):
    assert (ROOT / "attn_exp" / "py.typed").is_file()
    (tmp_path / "snippet.py").write_text(SNIPPET)
    ran = subprocess.run(
        # With what `make lint` has found out, which is of use only with the same options; they are strict.
        [sys.executable, "-m", "mypy", *(f"--{flag}={ROOT / file}" for flag, file in CHECKED), "snippet.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    revealed = [line.split('"')[1].rpartition(".")[2] for line in ran.stdout.splitlines() if "Revealed type" in line]
    assert revealed[:4] == ["Sweep", "Rivals", "Changes", "History"]
    assert "Mapping[str, float]" in ran.stdout or "Mapping[builtins.str, builtins.float]" in ran.stdout
    errors = [line for line in ran.stdout.splitlines() if " error: " in line]
    assert errors and all("snippet.py:12:" in line for line in errors), ran.stdout


def test_importing_the_package_imports_nothing_but_the_api():
    found = python("import sys, attn_exp; print(*sorted(name for name in sys.modules if 'attn_exp' in name))").split()
    assert {name.removeprefix("attn_exp") for name in found} == {
        *("", ".api", ".api.guard", ".api.read", ".api.run", ".api.time", ".core", ".core.versions")
    }


def test_compare_and_run_stay_functions_whatever_is_imported_later():
    code = """
import attn_exp.comparison.answer, attn_exp.execution.session
from attn_exp import compare, run, time
print(callable(compare), callable(run), callable(time))
"""
    assert python(code) == "True True True\n"
    assert attn_exp.run is attn_exp.api.run
    assert attn_exp.compare is attn_exp.api.compare


@pytest.fixture
def many(tmp_path):
    jobs = [
        sweeps.job(name, us, of=sweeps.case(batch=batch)) for name, us in (("flash", 100), ("cudnn", 80))
        for batch in range(1, 21)
    ]  # fmt: skip
    return sweeps.sweep(tmp_path / "first", [*jobs, sweeps.failed("error", "<b>fa3</b>", of=sweeps.case(batch=99))])


def test_a_sweep_prints_as_a_line_and_shows_as_its_first_rows(many):
    assert repr(many) == "<Sweep first: 41 records (40 ok, 1 error), NVIDIA H200>"
    html = many._repr_html_()
    assert html.count("<tr>") == 11 and "31 more rows" in html
    assert "<b>" not in html


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "<Rivals of first by time_us: 82 rows>"),
        ({"baseline": "flash", "metric": "forward/tflops"}, "<Rivals of first by forward/tflops: 41 rows>"),
        ({"against": "first"}, "<Changes of first, other by time_us: 82 rows>"),
        ({"history": True}, "<History of first, other, third by time_us: 80 rows>"),
    ],
)
def test_a_comparison_prints_as_a_line_and_shows_as_its_first_rows(many, tmp_path, keys, line):
    for name in ("other", "third"):
        sweeps.write(tmp_path / name, [result.record() for result in many.results])
    sweep = ["first", "other", "third"] if "history" in keys else "other" if "against" in keys else "first"
    found = attn_exp.compare(sweep, folder=tmp_path, **keys)
    assert repr(found) == line
    html = found._repr_html_()
    assert html.count("<tr>") == 11 and "more rows: to_frame() has all" in html
    assert "<b>" not in html and "flash" in html


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Sweeps that were measured with an earlier version."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(ROOT / "tests" / "fixtures" / "identity" / "sweeps.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "multirun"


def test_kept_sweeps_are_loaded_compared_and_printed_briefly(kept):
    rows = 0
    for folder in sorted(kept.iterdir()):
        sweep = attn_exp.load(folder)
        assert not sweep.broken and len(repr(sweep)) < 200, folder
        if not any(result.status == "ok" for result in sweep.results):
            continue
        found = attn_exp.compare(sweep)
        assert len(repr(found)) < 200 and len(found._repr_html_()) < 10_000
        rows += len(found.rows)
    assert rows > 100


def test_the_package_lists_what_is_meant():
    import attn_exp

    assert dir(attn_exp) == sorted(attn_exp.__all__)
