"""The code that a record comes from: the package's commit and tree, and a hash of what measures.

Git runs nothing that a checkout names, and is asked only about a checkout that the package belongs to.
"""

import ast
import hashlib
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from attn_exp.core.source import git, is_installed

_PACKAGE = Path(__file__).resolve().parents[1]
# The files, and folders of files, whose code a time depends on; one that does not exist is left out.
_MEASURES = ("timers", "core/stats", "worker/measure.py")
_DIGITS = 16


@cache
def git_commit(package: Path = _PACKAGE) -> str | None:
    """Return the commit of the checkout that the package belongs to, with `-dirty` if it was changed.

    None outside of one.
    """
    return git(package, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*") if _head(package) else None


@cache
def tree(package: Path = _PACKAGE) -> str:
    """Return the hash of the package: that of its tree in git, or `files:` and a hash of its .py files.

    The latter if a file below the package differs from its checkout, or is unknown to it. Without a checkout it is what
    the variable ATTN_EXP_TREE says, if it is set.
    """
    head = _head(package)
    if head and git(package, "status", "--porcelain", "--untracked-files=all", "--", ".") == "":
        return head
    told = "" if head else os.environ.get("ATTN_EXP_TREE", "")
    return told or f"files:{_hash(package, package.rglob('*.py'), lambda path: path.read_bytes())}"


@cache
def measuring(package: Path = _PACKAGE) -> str:
    """Return a hash of the syntax of what measures: no comments, docstrings, formatting or line numbers."""
    places = [package / name for name in _MEASURES]
    files = [path for place in places for path in ([place] if place.suffix else place.rglob("*.py"))]
    return _hash(package, files, lambda path: syntax(path.read_bytes()).encode())


def syntax(source: str | bytes) -> str:
    """Return a program's syntax tree as text, without docstrings.

    `ast.dump` differs between versions of Python, which add fields; here empty ones are left out.
    """
    return _text(ast.parse(source))


def _text(node: Any) -> str:
    if isinstance(node, list):
        return f"[{' '.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [type(node).__name__]
    for name in node._fields:
        value: Any = getattr(node, name, None)
        if name == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            value = value[ast.get_docstring(node, clean=False) is not None :]
        if value is not None and value != [] and name != "ctx":
            parts += name, _text(value)
    return f"({' '.join(parts)})"


def _hash(package: Path, files: Iterable[Path], content: Callable[[Path], bytes]) -> str:
    whole = hashlib.sha256()
    for path in sorted(filter(Path.is_file, files)):
        whole.update(f"{path.relative_to(package).as_posix()}\0".encode())
        whole.update(hashlib.sha256(content(path)).digest())
    return whole.hexdigest()[:_DIGITS]


@cache
def _head(package: Path) -> str | None:
    """Return the hash of the package's folder in its checkout's commit; None if it is not a part of one."""
    # A package that is installed has nothing to do with the checkout around a virtual environment.
    return None if is_installed(package.parent) else git(package, "rev-parse", "--verify", "--quiet", "HEAD:./")
