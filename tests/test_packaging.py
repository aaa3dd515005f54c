import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli import QUICK, records

ROOT = Path(__file__).resolve().parent.parent
CONF = sorted(path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml"))


def python(*arguments, cwd, path=None, **more):
    """A python that does not see the checkout, unless through an editable install behind `path`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COMP_"))}
    variables = kept | ({"PYTHONPATH": str(path)} if path else {}) | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the checkout by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    built = python("-c", build, str(folder), cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory):
    """The wheel installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("target")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    done = python(*install, "--target", str(folder), str(wheel), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_carries_the_configuration_and_no_more_than_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name.removeprefix("attn_exp/conf/") for name in names if name.startswith("attn_exp/conf/")) == CONF
    assert {name.split("/")[0] for name in names} == {"attn_exp", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "attn_exp").rglob("*.py")}
    assert modules <= set(names)


def test_an_installed_wheel_composes_from_its_own_configuration(target, tmp_path):
    where = python("-c", "import attn_exp.conf as c; print(c.conf_folder())", cwd=tmp_path, path=target)
    assert where.stdout.strip() == str(target / "attn_exp" / "conf")
    shown = python("-m", "attn_exp", "--cfg", "job", cwd=tmp_path, path=target)
    assert shown.returncode == 0, shown.stderr
    assert "name: gpt2" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_installed_wheel_measures(target, tmp_path):
    # The worker is a process of its own and has to find the same package.
    done = python("-m", "attn_exp", "backend=eager", "sweep=s", "tracker=none", *QUICK, cwd=tmp_path, path=target)
    assert done.returncode == 0, done.stderr
    assert records(tmp_path, "s")["eager"].status == "ok"


def test_the_installed_command_runs(target, tmp_path):
    script = target / "bin" / "attn-exp"
    shown = python(str(script), "--cfg", "job", cwd=tmp_path, path=target)
    assert shown.returncode == 0, shown.stderr
    assert "name: gpt2" in shown.stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("attn-exp backend=fl", {"backend=flash", "backend=flex"}),
        ("attn-exp -m batch=1,2 model=ll", {"model=llama3_8b", "model=llama3_70b"}),
        ("attn-exp +experiment=sdp", {"+experiment=sdpa_sweep"}),
        ("attn-exp stopping.bud", {"stopping.budget_s="}),
    ],
)
def test_a_tab_offers_what_can_follow(target, tmp_path, line, offered):
    # As Hydra's bash function asks: hydra/_internal/core_plugins/bash_completion.py.
    script = str(target / "bin" / "attn-exp")
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    told = python(script, "-sc", "query=bash", cwd=tmp_path, path=target, **asked)
    assert (told.returncode, told.stderr) == (0, "")
    assert set(told.stdout.split()) == offered
    assert list(tmp_path.iterdir()) == []


def test_the_completion_can_be_installed(target, tmp_path):
    told = python(str(target / "bin" / "attn-exp"), "-sc", "install=bash", cwd=tmp_path, path=target)
    assert told.returncode == 0, told.stderr
    assert told.stdout.rstrip().endswith("complete -o nospace -o default -F hydra_bash_completion attn-exp")


@pytest.mark.parametrize(
    "question", [["-sc", "query=bash"], ["--help"], ["--cfg", "job"], ["-i", "defaults"], ["--cfg=job"]]
)
def test_a_question_starts_no_worker(monkeypatch, tmp_path, question):
    from inprocess import typed

    started = []
    call = typed(monkeypatch, tmp_path)
    monkeypatch.setattr("attn_exp.__main__.start_ahead", started.append)
    monkeypatch.setenv("COMP_LINE", "attn-exp backend=fl")
    code, out, _ = call(*question)
    assert (code, started) == (0, [])
    assert out
    call("batch=0")
    assert len(started) == 1
