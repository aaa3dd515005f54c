import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from cli import QUICK, records

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONF = sorted(path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml"))


def told(*command, cwd, **more):
    """What a command did, in an environment without Python's variables."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COMP_", "VIRTUAL_ENV"))
    }
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1"} | more,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the checkout by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("dist")
    quiet = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    built = told(sys.executable, "-m", "pip", "wheel", *quiet, "--wheel-dir", folder, ".", cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bin_(wheel, tmp_path_factory):
    """The programs of a new environment that has the wheel; it sees the packages of this one, but not the checkout."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # A folder in a .pth is searched, and the .pth files in it are not read: editable installs stay out of sight.
    (site / "others.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    quiet = ("--quiet", "--no-index", "--disable-pip-version-check", "--force-reinstall", "--no-deps")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    done = told(*pip, "install", *quiet, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_the_wheel_carries_the_configuration_and_no_more_than_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name.removeprefix("attn_exp/conf/") for name in names if name.startswith("attn_exp/conf/")) == CONF
    figures = sorted(path.name for path in (ROOT / "published").iterdir())
    inside = [name for name in names if name.startswith("attn_exp/published/")]
    assert sorted(name.removeprefix("attn_exp/published/") for name in inside) == figures
    own = {"attn_exp", "hydra_plugins", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    assert {name.split("/")[0] for name in names} == own
    # Modules, and what they read: the report's template, style sheet and script.
    package = {path for path in (ROOT / "attn_exp").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.suffix for path in package} >= {".py", ".jinja", ".css", ".js"}
    assert {path.relative_to(ROOT).as_posix() for path in package} <= set(names)
    # With an __init__.py it would hide the plugins of all other packages.
    assert [name for name in names if name.startswith("hydra_plugins/")] == ["hydra_plugins/attn_exp.py"]


def test_the_wheel_asks_for_what_pyproject_names(wheel):
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    lines = zipfile.ZipFile(wheel).read(name).decode().splitlines()
    assert {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra: ")} == set(EXTRAS)
    needed = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])


def test_every_extra_is_bounded_and_explained():
    page = (ROOT / "docs" / "getting_started.md").read_text()
    for extra, packages in EXTRAS.items():
        assert extra == "dev" or f"`{extra}`" in page, extra
        # torch has no upper bound, and requires a Triton of its own.
        unbounded = [package for package in packages if "," not in package or "<" not in package]
        assert unbounded == (["triton>=3.6"] if extra == "dev" else []), packages


def test_a_backend_s_extra_is_what_its_backend_says_to_install():
    page = (ROOT / "docs" / "backends.md").read_text()
    for extra in ("cudnn", "fa2", "fa4", "flashinfer", "helion", "sage", "te", "xformers"):
        (package,) = EXTRAS[extra]
        assert f'"{package}"' in page or f"'attn_exp[{extra}]'" in page, extra


def test_the_source_distribution_has_what_is_tracked(tmp_path):
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    built = told(sys.executable, "-c", build, tmp_path, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / built.stdout.splitlines()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    code = ("attn_exp", "hydra_plugins", "conf", "published", "tests", "examples", "bench")
    for folder in (*code, "docs", "results", "docker", "action"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {name for name in files - names if "__pycache__" not in name and "secrets" not in name} == set()
    assert {"LICENSE", "README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci/run"} <= names


def test_an_installed_wheel_composes_from_its_own_configuration(bin_, tmp_path):
    where = told(bin_ / "python", "-c", "import attn_exp.core.conf as c; print(c.conf_folder())", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(bin_.parent), where
    shown = told(bin_ / "python", "-m", "attn_exp", "--cfg", "job", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "name: gpt2" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_it_has_all_that_it_imports(bin_, tmp_path):
    checked = told(sys.executable, "-m", "pip", "--python", bin_ / "python", "check", cwd=tmp_path)
    assert "attn_exp" not in checked.stdout.replace("-", "_"), checked.stdout


def test_the_installed_command_measures_with_choices_of_one_s_own(bin_, tmp_path):
    # The worker is a process of its own and has to find the same package.
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    mine = "_target_: attn_exp.backends.eager.Eager\nname: mine\n"
    (tmp_path / "conf" / "backend" / "mine.yaml").write_text(mine)
    words = ("--config-dir", "conf", "-m", "backend=mine,math", "sweep=s", *QUICK)
    done = told(bin_ / "attn-exp", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = records(tmp_path, "s")
    assert {name: record.status for name, record in found.items()} == {"mine": "ok", "math": "ok"}
    compared = told(bin_ / "attn-exp", "compare", "s", "baseline=mine", "out=r.html", cwd=tmp_path)
    assert (compared.returncode, (tmp_path / "r.html").exists()) == (0, True), compared.stderr


def test_the_installed_command_says_what_was_typed_wrong(bin_, tmp_path):
    done = told(bin_ / "attn-exp", "backend=flsh", "device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean 'flash'?" in done.stderr


def test_the_completion_can_be_installed(bin_, tmp_path):
    done = told(bin_ / "attn-exp", "-sc", "install=bash", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("complete -o nospace -o default -F hydra_bash_completion attn-exp")
