"""The source of a backend from elsewhere: the files that it is made of, a hash over them, and where they come from.

Nothing is imported and no code of the user's runs.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

from attn_exp.core.module_files import MOST_BYTES, OURS, covered, is_installed, module_file, stamp_of

_GIT_LIMIT_S = 5.0
SHORT = 7


@dataclass(frozen=True)
class Source:
    """The files that a backend is made of.

    Attributes:
        facts: `module`; `sha256` over the names and contents of `files`; how many `files` there are; the `package` and
            its version, if it is installed.
        files: the hash of each file's content.
        root: the folder that Python found the module or its package in.
    """

    facts: dict[str, str]
    files: dict[Path, str]
    root: Path


def source_of(target: str) -> Source | None:
    """Return the source of the class that `_target_` names, as `pkg.mod.Class` or `pkg.mod:Class`.

    None for a class of this package, and for one whose module is not found or has no file.
    """
    if target.partition(":")[0].split(".")[0] == OURS:
        return None
    found = module_file(target)
    if found is None:
        return None
    name, file = found
    root = file.parents[name.count(".") + (file.name == "__init__.py")]
    paths = covered(file, root)
    hashes = {path: _hash(path) for path in paths}
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(f"{path.relative_to(root).as_posix()}\0{hashes[path]}\n".encode())
    facts = {"module": name, "sha256": whole.hexdigest(), "files": str(len(paths))}
    if (package := _distribution(name.partition(".")[0], root)) is not None:
        facts["package"] = package
    return Source(facts, hashes, root)


def described(target: str) -> dict[str, str]:
    """Return the facts of a class's source as a request has them; empty if `source_of` finds none.

    For files in a git checkout they have its `commit`, and under `changes` whether the files differ from it:
    `uncommitted` or `none`.
    """
    found = source_of(target)
    if found is None:
        return {}
    # An installed package has a version, and no commit of the checkout around a virtual environment.
    checkout = (
        {} if is_installed(found.root) else _checkout(found.root, tuple(sorted(found.files)), found.facts["sha256"])
    )
    return found.facts | checkout


def identity(facts: Mapping[str, str]) -> dict[str, str]:
    """Return what makes two sources the same: the hash and the package's version.

    A commit that changes no file of a backend does not make it another one.
    """
    return {name: facts[name] for name in ("sha256", "package") if name in facts}


def short(facts: Mapping[str, str]) -> str:
    """Return the first characters of the hash, as git shows a commit; empty without one."""
    return facts.get("sha256", "")[:SHORT]


def commit(facts: Mapping[str, str]) -> str:
    """Return the commit, with `-dirty` if files differ from it, as `git describe` writes it; empty without one."""
    return facts.get("commit", "") + "-dirty" * (facts.get("changes") == "uncommitted")


def _hash(path: Path) -> str:
    """Return the hash of a file's content. A file larger than `MOST_BYTES` counts by its size only."""
    try:
        stamp = stamp_of(path)
        return f"{stamp[0]} bytes" if stamp[0] > MOST_BYTES else _hash_once(path, stamp)
    except OSError as error:
        return f"not readable: {error.strerror}"


@cache
def _hash_once(path: Path, stamp: tuple[int, ...]) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _distribution(top: str, root: Path) -> str | None:
    """Return the name and version of the package that installed a module, or None."""
    here = Path.cwd().resolve()
    beside = [here, *(Path(part).resolve() for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    if not is_installed(root) and root in beside:
        return None
    names = _distributions().get(top, ())
    return f"{names[0]}=={version(names[0])}" if names else None


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


@cache
def _checkout(root: Path, files: tuple[Path, ...], sha256: str) -> dict[str, str]:
    """Return the commit of the checkout in which files lie, and whether they differ from it; empty without one."""
    names = [path.relative_to(root).as_posix() for path in files]
    # Neither `status` nor `diff`: they run the filters and the monitor that a foreign repository names.
    said = _git(root, "rev-parse", "HEAD"), _git(root, "ls-tree", "-r", "-z", "HEAD", "--", *names)
    if said[0] is None or not said[1]:
        # Files that a checkout does not know have nothing to do with its commit.
        return {}
    entries = (entry.partition("\t") for entry in said[1].split("\0") if entry)
    kept = {name: facts.split()[2] for facts, _, name in entries}
    same = all(kept.get(name) in _blobs(path) for name, path in zip(names, files, strict=True))
    return {"commit": said[0].strip(), "changes": "none" if same else "uncommitted"}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), "--literal-pathspecs", *arguments]
    variables = os.environ | {"GIT_NO_LAZY_FETCH": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_GIT_LIMIT_S, check=True, text=True, env=variables)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return ran.stdout


def _blobs(path: Path) -> set[str]:
    """Return the names that git may have for a file's content, by the hashes that repositories use."""
    try:
        content = path.read_bytes()
    except OSError:
        return set()
    blob = b"blob %d\0" % len(content) + content
    return {hashlib.sha1(blob, usedforsecurity=False).hexdigest(), hashlib.sha256(blob).hexdigest()}
