"""The Docker files, as far as they can be checked without Docker: their instructions, paths, versions and extras."""

import csv
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
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


def test_copied_files_are_there_and_not_ignored():
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


def in_root(root, bound, command, env, user="root", folder="/"):
    """What a command prints in a root of its own, in which it sees `bound` of this machine and cannot change it."""
    mounts = ["set -e"]
    for source in bound:
        inside = shlex.quote(f"{root}{source}")
        mounts.append(f"mkdir -p {inside}; mount --bind {source} {inside}; mount -o remount,bind,ro {inside}")
    mounts += [f"mount --rbind /{name} {shlex.quote(f'{root}/{name}')}" for name in ("dev", "proc")]
    inner = f"cd {shlex.quote(folder)} && {command}"
    mounts.append(shlex.join(["exec", "chroot", f"--userspec={user}", str(root), "/bin/sh", "-c", inner]))
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(mounts)], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.mark.clean_root
@pytest.mark.timeout(3600)
def test_each_step_runs_in_a_clean_root_up_to_the_demo(tmp_path):
    """As root: `python -m pytest -s -m clean_root tests/test_docker.py`, with TORCH=2.13.0 for another torch.

    The root has this machine's /usr and a copy of its /etc in place of the base image. The step of apt-get does not
    run: that its packages are there is checked, but for Nsight Compute.
    """
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --mount needs root")
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    indexes = set(re.findall(r"(?:file://|[' ])(/[^\s']+?)(?:/simple)?(?=[\s'])", pip.stdout))
    bound = ["/usr", *sorted(path for path in indexes if Path(path).is_dir())]
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        root, user, folder = Path(name), "root", "/"
        root.chmod(0o755)
        for empty in ("dev", "home", "opt", "proc", "root", "tmp", "var/log"):
            (root / empty).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        for linked in ("bin", "lib", "lib64", "sbin"):
            (root / linked).symlink_to(f"usr/{linked}")
        shutil.copytree("/etc", root / "etc", symlinks=True)
        for instruction, words in instructions("Dockerfile"):
            if "apt-get" in words:
                command = "g++ --version && python3 -m venv --help && ls /usr/include/python3.*/Python.h"
                in_root(root, bound, command, env)
            elif instruction == "RUN":
                in_root(root, bound, words, env, user, folder)
            elif instruction == "COPY":
                *sources, target = words.split()
                for source in sources:
                    to = root / folder.lstrip("/") / target / ("" if (ROOT / source).is_dir() else source)
                    copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                    copy(ROOT / source, to)
            elif instruction == "WORKDIR":
                folder = words
                (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif instruction in ("ENV", "ARG"):
                given = dict(word.split("=", 1) for word in shlex.split(string.Template(words).substitute(env)))
                env |= {key: os.environ.get(key, given[key]) for key in given} if instruction == "ARG" else given
            elif instruction == "USER":
                user = words
        entry = shlex.join(json.loads(of("Dockerfile", "ENTRYPOINT")[0]))
        arguments = shlex.join(json.loads(of("Dockerfile", "CMD")[0]))
        assert "backend" in in_root(root, bound, f"{entry} {arguments}", env, user, folder)
        demo = re.search(r"-m attn_exp (-m .*)", (ROOT / "Makefile").read_text())[1]
        print(in_root(root, bound, f"{entry} {demo}", env, user, folder))
        (table,) = (root / "work/multirun").glob("*/table.csv")
        assert {row["status"] for row in csv.DictReader(table.open())} == {"ok"}
        whoami, *frozen = in_root(root, bound, "id -un; pip freeze", env, user).split()
        versions = dict(line.split("==") for line in frozen if "==" in line)
        assert whoami == user and versions["torch"].split("+")[0] == env["TORCH"]
        others = {package for package, version in versions.items() if LOCKED.get(package, version) != version}
        assert others <= {"torch", "triton"}
