"""The Docker files, as far as they can be checked without Docker: their instructions, paths, versions and extras."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each with the folder that it is built in.
CONTEXTS = {"Dockerfile": ROOT, "server.Dockerfile": ROOT / "docker"}
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
LOCKED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:60])


def instructions(name):
    """(instruction, its words as text), comments out and continued lines joined."""
    lines = [line for line in (ROOT / "docker" / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


def of(name, instruction):
    return [words for found, words in instructions(name) if found == instruction]


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_instructions_parse(name):
    found = [instruction for instruction, _ in instructions(name)]
    assert found[0] == "FROM" and set(found) <= INSTRUCTIONS
    for words in of(name, "RUN"):
        assert subprocess.run(["sh", "-n", "-c", words], check=False).returncode == 0, words
    for words in of(name, "ENTRYPOINT") + of(name, "CMD"):
        assert all(isinstance(word, str) for word in json.loads(words))
    for words in of(name, "ENV") + of(name, "ARG"):
        assert all("=" in word for word in shlex.split(words))
    declared = {word.split("=")[0] for words in of(name, "ENV") + of(name, "ARG") for word in shlex.split(words)}
    used = {variable for _, words in instructions(name) for variable in re.findall(r"(?<![$\\])\$\{?(\w+)", words)}
    assert used <= declared
    assert of(name, "USER"), "it must not run as root"


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_bases_and_packages_have_versions_and_they_are_the_locked_ones(name):
    (base,) = of(name, "FROM")
    assert re.fullmatch(r"[\w/]+:\d[\w.-]+", base)
    pins = dict(re.findall(r"([\w-]+)(?:\[\w+\])?==(\d[\w.]*)", "\n".join(of(name, "RUN"))))
    assert {package: LOCKED[package] for package in pins} == pins
    installed = [words for words in of(name, "RUN") if "pip install" in words]
    assert all("--constraint constraints.txt" in words for words in installed) or (pins and len(installed) == 1)


def test_the_image_has_the_versions_that_the_results_were_measured_with():
    torch, cuda = re.search(r"torch (\d+\.\d+) \+ CUDA (\d+)", (ROOT / "results/h100/README.md").read_text()).groups()
    (base,) = of("Dockerfile", "FROM")
    assert of("Dockerfile", "ARG")[0].startswith(f"TORCH={torch}.") and f":{cuda}." in base
    minor = re.search(r":(\d+)\.(\d+)", base).groups()
    assert f" cuda-nsight-compute-{'-'.join(minor)} " in of("Dockerfile", "RUN")[0]


def test_what_is_copied_is_there_and_not_ignored():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    copied = {source for words in of("Dockerfile", "COPY") for source in words.split()[:-1]}
    for source in copied:
        assert (ROOT / source).exists() and source in kept, source
    assert kept == copied
    assert of("server.Dockerfile", "COPY") == []


def test_all_that_the_package_is_built_from_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {source for words in of("Dockerfile", "COPY") for source in words.split()[:-1]}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | set(wheel["packages"]) | set(wheel["force-include"]) <= copied
    extras = set(project["project"]["optional-dependencies"])
    texts = (ROOT / "docker/Dockerfile").read_text() + (ROOT / "docs/clusters.md").read_text()
    named = {extra for found in re.findall(r"EXTRAS=([\w,]+)", texts) for extra in found.split(",")}
    assert named and named <= extras
