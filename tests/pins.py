"""What the pins of constraints.txt require, kept in tests/fixtures/pinned_requirements.json.

`python tests/pins.py` writes that file; run it after each change of constraints.txt. It asks the package index for
metadata only, a few kilobytes per distribution.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, FIXTURE = ROOT / "constraints.txt", ROOT / "tests/fixtures/pinned_requirements.json"
COMMAND = "python tests/pins.py"
PYTHONS = ("3.11", "3.12", "3.13")
# Published without a wheel.
SOURCE_ONLY = ("antlr4-python3-runtime",)
# Not pinned: torch's wheel requires an exact version of each, which differs between CUDA builds; CPU builds need none.
CUDA = (
    "cuda-bindings",
    "cuda-toolkit",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
)
# Not pinned: kernel packages, which need a GPU and are built for the torch that is installed.
KERNELS = (
    *("flash-attn", "flash-attn-4", "flashinfer-python", "helion", "nvidia-cudnn-frontend", "sageattention"),
    *("transformer-engine", "xformers"),
)
# Not pinned: the tests in a browser run by themselves.
BROWSER = ("playwright",)
# The newest Linux that PyTorch's wheels require, and all before.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + [
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64",
]  # fmt: skip


def read_pins() -> dict[str, str]:
    """Return the pinned version of each distribution, by its canonical name."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in (line.split("==") for line in lines)}


def read_project() -> list[str]:
    """Return what pyproject.toml requires, the extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]


def environment(python: str) -> dict[str, str]:
    """Return the values of markers on Linux x86-64."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def applies(marker: Marker | None, python: str, extras: set[str]) -> bool:
    """Whether a requirement with this marker holds on one Python, for a distribution installed with these extras."""
    return marker is None or any(marker.evaluate({**environment(python), "extra": extra}) for extra in extras | {""})


def check(pins: dict[str, str], known: dict[str, dict], project: list[str], python: str) -> tuple[list[str], set[str]]:
    """Return what does not fit, a sentence each, and the names of the pinned distributions that are required.

    Args:
        pins: the pinned version of each distribution.
        known: what `name==version` requires: {"python": a specifier, "requires": requirements}.
        project: the requirements that all starts with.
        python: the version that markers are evaluated for.
    """
    problems, seen = [], set()
    open_ = [("attn_exp", requirement, {""}) for requirement in project]
    while open_:
        by, text, extras = open_.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if not applies(requirement.marker, python, extras) or name in CUDA + KERNELS + BROWSER:
            continue
        if name not in pins:
            problems.append(f"{by} requires {requirement.name}, which constraints.txt does not pin")
            continue
        key = f"{name}=={pins[name]}"
        if not requirement.specifier.contains(pins[name], prereleases=True):
            problems.append(f"{by} requires {name}{requirement.specifier}, but constraints.txt pins {pins[name]}")
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if key not in known:
            problems.append(f"{FIXTURE.name} does not know what {key} requires: run `{COMMAND}`")
            continue
        if not SpecifierSet(known[key]["python"]).contains(f"{python}.0"):
            problems.append(f"{key} requires Python {known[key]['python']}, not {python}")
        open_ += [(key, one, requirement.extras) for one in known[key]["requires"]]
    return sorted(set(problems)), {name for name, _ in seen}


def _asked_extras(known: dict[str, dict], project: list[str]) -> dict[str, set[str]]:
    """Return the extras that anything asks of each distribution."""
    every = [*project, *(one for entry in known.values() for one in entry["requires"])]
    asked: dict[str, set[str]] = {}
    for requirement in map(Requirement, every):
        asked.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)
    return asked


def _may_apply(text: str, extras: set[str]) -> bool:
    return any(applies(Requirement(text).marker, python, extras) for python in PYTHONS)


def ask_index(python: str) -> dict[str, dict]:
    """Return what the index says that each pin requires on one Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    kept |= {name: os.environ[name] for name in ("PIP_CERT", "PIP_INDEX_URL", "PIP_PROXY") if name in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        report, pins = Path(folder, "report.json"), Path(folder, "pins.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in read_pins().items()))
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
            "--only-binary=:all:", *(f"--no-binary={name}" for name in SOURCE_ONLY), f"--python-version={python}",
            *(f"--platform={platform}" for platform in _PLATFORMS), f"--target={folder}/target",
            f"--report={report}", f"--requirement={pins}",
        ]  # fmt: skip
        # Without pip's configuration: builds on a local disk may require less than those of the index.
        own = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run(command, check=True, env=kept | own)
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {
        f"{canonicalize_name(one['name'])}=={one['version']}": {
            "python": one.get("requires_python", ""), "requires": sorted(one.get("requires_dist", [])),
        }
        for one in found
    }  # fmt: skip


def main() -> None:
    """Write the fixture: of each pin, all that any of the Pythons requires with the extras that are asked for."""
    known: dict[str, dict] = {}
    for python in PYTHONS:
        for key, entry in ask_index(python).items():
            if known.setdefault(key, entry) != entry:
                raise SystemExit(f"{key} requires something else on Python {python}: keep an entry per Python")
    before = None
    # What an extra requires may ask for extras itself, so it takes several rounds.
    while before != (before := sum(len(entry["requires"]) for entry in known.values())):
        asked = _asked_extras(known, read_project())
        for key, entry in known.items():
            extras = asked.get(key.partition("==")[0], set())
            entry["requires"] = [text for text in entry["requires"] if _may_apply(text, extras)]
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known))
    FIXTURE.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(known)} distributions: {FIXTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
