"""The files that a module is made of: found as Python's import finds them, and read as text: none of it runs."""

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import get_importer

# Bounds of what is read: a package may have thousands of files, and a job's name must be known in milliseconds.
MOST_FILES = 256
MOST_BYTES = 8 << 20
OURS = "attn_exp"
_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp")
# A module may name these in a text, for `torch.utils.cpp_extension.load` and its like.
_NAMED = (*_SUFFIXES[1:], ".ptx", ".cubin", ".so")


def module_file(target: str) -> tuple[str, Path] | None:
    """Return the name and the file of the module in which a class is looked for."""
    module, colon, _ = target.partition(":")
    found: tuple[str, Path] | None = None
    path: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _spec(name, path)
        if spec is None:
            break
        if spec.origin is not None and spec.has_location and Path(spec.origin).is_file():
            found = name, Path(spec.origin).resolve()
        path = list(spec.submodule_search_locations or ())
        if not path:
            break
    if found is None or (colon and found[0] != module):
        return None
    return found


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module without importing it or its parent."""
    try:
        if path is not None:
            return _below(name, path)
        spec = PathFinder.find_spec(name, _search_path())
        # Editable installations add finders of their own, which look the name up in a table.
        finders = iter(sys.meta_path)
        while spec is None and (finder := next(finders, None)) is not None:
            if finder not in (BuiltinImporter, FrozenImporter, PathFinder):
                spec = finder.find_spec(name, None)
        return spec
    except (ImportError, AttributeError, ValueError, OSError):
        return None


def _below(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module in the folders of its parent, which PathFinder imports first if it has no `__init__.py`."""
    portions: list[str] = []
    for place in path:
        finder = get_importer(place)
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return spec
        portions += [] if spec is None else spec.submodule_search_locations or ()
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


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


def covered(file: Path, root: Path) -> list[Path]:
    """Return the files that count, the nearest first: those of the package, and what its modules import beside it."""
    files: dict[Path, None] = {}
    waiting, size = _first(file, root), 0
    beside = not is_installed(root)
    while waiting:
        path = waiting.pop(0)
        if len(files) >= MOST_FILES or size > MOST_BYTES:
            break
        if path in files:
            continue
        files[path] = None
        size += _size(path)
        # In a folder of installed packages every import lies beside the module.
        if beside and path.suffix == ".py" and (path == file or path.parent == root):
            imports, texts = _named(path)
            for module in imports:
                if module != OURS:
                    waiting += _beside(module, root)
            waiting += [named for text in texts if (named := _inside(path.parent / text, root)) is not None]
    return list(files)


def _first(file: Path, root: Path) -> list[Path]:
    """Return a module's file, and if it lies in a package that package's files, from its own folder outwards."""
    files = [file]
    if file.parent != root:
        folder = file.parent
        while folder != root:
            files += _sources(folder)
            folder = folder.parent
    return files


def _beside(module: str, root: Path) -> list[Path]:
    """Return the files of a module or package that lies in a folder; none if it is elsewhere."""
    if (root / module / "__init__.py").is_file():
        return list(_sources((root / module).resolve()))
    file = _inside(root / f"{module}.py", root)
    return [] if file is None else [file]


def _inside(path: Path, root: Path) -> Path | None:
    try:
        path = path.resolve()
        return path if path.is_file() and path.is_relative_to(root) else None
    except (OSError, ValueError):
        return None


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the source files in a folder and below it, the nearest first, at most `MOST_FILES`."""
    folders, count = [folder], 0
    while folders and count < MOST_FILES:
        here = folders.pop(0)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return what changes if a file is written: every job of a sweep asks, and reads only what is new."""
    known = path.stat()
    return known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino


def _named(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the top-level modules that a module imports, and the texts in it that may name files."""
    try:
        stamp = stamp_of(path)
        return ((), ()) if stamp[0] > MOST_BYTES else _named_once(path, stamp)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return (), ()


@cache
def _named_once(path: Path, stamp: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
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
