"""The source of a backend from elsewhere: the files that it is made of, a hash over them, and where they come from.

Modules are found as Python's import finds them and read as text: nothing is imported and no code of the user's runs.
"""

import ast
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from attn_exp.core.text import flat

# Bounds of what is read: a package may have thousands of files, and a job's name must be known in milliseconds.
MOST_FILES = 256
MOST_BYTES = 8 << 20
OURS = "attn_exp"
_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp")
# A module may name these in a text, for `torch.utils.cpp_extension.load` and its like.
_NAMED = (*_SUFFIXES[1:], ".ptx", ".cubin", ".so")
_GIT_LIMIT_S = 5.0
_BACKENDS = re.compile(r"attn_exp\.backends\.\w+\.[A-Z]\w*", re.ASCII)
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


def foreign_classes(options: Mapping[str, Any]) -> list[str]:
    """Return the classes that a record names, as `_target_` at any depth, and that are no backends of this package."""
    named = [str(value) for key, value in flat(options).items() if key.split(".")[-1] == "_target_"]
    return [target for target in named if not _BACKENDS.fullmatch(target)]


def source_of(target: str) -> Source | None:
    """Return the source of the class that `_target_` names, as `pkg.mod.Class` or `pkg.mod:Class`.

    None for a class of this package, and for one whose module is not found or has no file.
    """
    if target.partition(":")[0].split(".")[0] == OURS:
        return None
    found = _module_file(target)
    if found is None:
        return None
    name, file = found
    root = file.parents[name.count(".") + (file.name == "__init__.py")]
    paths = _covered(file, root)
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


def _module_file(target: str) -> tuple[str, Path] | None:
    """Return the name and the file of the module in which a class is looked for."""
    module, colon, _ = target.partition(":")
    parts, found, path = module.split("."), None, None
    for depth, part in enumerate(parts, 1):
        spec = _spec(part, path)
        if spec is None:
            break
        if spec.origin is not None and spec.has_location and Path(spec.origin).is_file():
            found = ".".join(parts[:depth]), Path(spec.origin).resolve()
        path = list(spec.submodule_search_locations or ())
        if not path:
            break
    return None if found is None or (colon and found[0] != module) else found


def _spec(part: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module by the last part of its name in the folders of its parent, or in those where a worker looks."""
    try:
        spec = PathFinder.find_spec(part, _search_path() if path is None else path)
        if path is None:
            # Editable installations add finders of their own, which look the name up in a table.
            finders = iter(sys.meta_path)
            while spec is None and (finder := next(finders, None)) is not None:
                if finder not in (BuiltinImporter, FrozenImporter, PathFinder):
                    spec = finder.find_spec(part, None)
        return spec
    except (ImportError, AttributeError, ValueError, OSError):
        return None


def _search_path() -> list[str]:
    """Return the folders in which a worker looks: it starts with `python -m`, and has the current folder last."""
    here = os.getcwd()
    given = [part or here for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    places = [*(given if os.environ.get("PYTHONPATH") else []), *(part or here for part in sys.path)]
    last = [] if os.environ.get("PYTHONSAFEPATH") else [here]
    return [*(place for place in places if place != here or place in given), *last]


def is_installed(root: Path) -> bool:
    """Return whether a folder is one that packages are installed into."""
    return root in _places() or root.name in ("site-packages", "dist-packages")


@cache
def _places() -> frozenset[Path]:
    return frozenset(Path(place).resolve() for place in sysconfig.get_paths().values())


def _covered(file: Path, root: Path) -> list[Path]:
    """Return the files that count, the nearest first: those of the package, and what its modules import beside it."""
    files: dict[Path, None] = {}
    waiting, size = [file], 0
    for folder in file.parents[: len(file.relative_to(root).parts) - 1]:
        waiting += _sources(folder)
    while waiting and len(files) < MOST_FILES and size <= MOST_BYTES:
        path = waiting.pop(0)
        if path in files:
            continue
        files[path] = None
        try:
            stamp = _stamp(path)
            size += stamp[0]
            # In a folder of installed packages every import lies beside the module.
            if is_installed(root) or path.suffix != ".py" or not (path == file or path.parent == root):
                continue
            imports, texts = _named(path, stamp) if stamp[0] <= MOST_BYTES else ((), ())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        for module in filter(OURS.__ne__, imports):
            if (root / module / "__init__.py").is_file():
                waiting += _sources((root / module).resolve())
            else:
                waiting += _inside(root / f"{module}.py", root)
        for text in texts:
            waiting += _inside(path.parent / text, root)
    return list(files)


def _inside(path: Path, root: Path) -> list[Path]:
    """Return a file that lies in a folder; nothing if it is elsewhere."""
    try:
        path = path.resolve()
        return [path] if path.is_file() and path.is_relative_to(root) else []
    except (OSError, ValueError):
        return []


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the source files in a folder and below it, the nearest first, at most `MOST_FILES`."""
    folders, count = [folder], 0
    while folders and count < MOST_FILES:
        try:
            entries = sorted(os.scandir(folders.pop(0)), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif entry.name.endswith(_SUFFIXES) and entry.is_file(follow_symlinks=False):
                count += 1
                yield Path(entry.path)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes if a file is written: every job of a sweep asks, and reads only what is new."""
    known = path.stat()
    return known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino


@cache
def _named(path: Path, stamp: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the top-level modules that a module imports, and the texts in it that may name files."""
    imports: dict[str, None] = {}
    texts: dict[str, None] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            imports |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports[node.module.partition(".")[0]] = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(_NAMED):
            texts[node.value] = None
    return tuple(imports), tuple(texts)


def _hash(path: Path) -> str:
    """Return the hash of a file's content. A file larger than `MOST_BYTES` counts by its size only."""
    try:
        stamp = _stamp(path)
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
    said = git(root, "rev-parse", "HEAD"), git(root, "ls-tree", "-r", "-z", "HEAD", "--", *names)
    if said[0] is None or not said[1]:
        # Files that a checkout does not know have nothing to do with its commit.
        return {}
    entries = (entry.partition("\t") for entry in said[1].split("\0") if entry)
    kept = {name: facts.split()[2] for facts, _, name in entries}
    blobs = (git(root, "hash-object", "--no-filters", "--", *names) or "").split()
    same = [kept.get(name) for name in names] == blobs
    return {"commit": said[0], "changes": "none" if same else "uncommitted"}


def git(folder: Path, *arguments: str) -> str | None:
    """Return what git says in a folder; None if it fails."""
    # The file system's monitor is a program that a foreign repository names.
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "--literal-pathspecs", *arguments]
    variables = os.environ | {"GIT_NO_LAZY_FETCH": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_GIT_LIMIT_S, check=True, text=True, env=variables)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return ran.stdout.strip()
