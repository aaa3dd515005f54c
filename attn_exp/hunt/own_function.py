"""The source of a user's own function of q, k and v: an import of it, or a copy where its module needs this package.

A function is imported from its module unless that module imports attn_exp, as that of a backend's class does. It is
copied then, with the functions and constants of its module that it uses and the values that it closes over.
"""

import ast
import functools
import importlib.util
import inspect
import sys
import textwrap
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_MOST_LINES = 18
_PLAIN = (bool, int, float, str, type(None))


class _Not(Exception):
    """The function has no source of its own; the message says why."""


def source_of(attention: Any) -> tuple[list[str], list[str]] | str:
    """Return the imports and the lines that define `candidate`, or in a sentence why there are none."""
    if attention is None:
        return "the backend gives no function of q, k and v (Calls.attention)"
    try:
        function, arguments = _unwrapped(attention)
        imports, lines, name = _defined(function)
    except _Not as reason:
        return str(reason)
    call = ", ".join(["q", "k", "v", *arguments])
    return imports, [*lines, "def candidate(q, k, v):", f"    return {name}({call})"]


def _unwrapped(attention: Any) -> tuple[Any, list[str]]:
    """Return the function under partial applications, and the named arguments that they add."""
    named: dict[str, Any] = {}
    while isinstance(attention, functools.partial):
        if attention.args:
            raise _Not("Calls.attention is a partial function with positional arguments: give them by name")
        named = attention.keywords | named
        attention = attention.func
    return attention, [f"{name}={_written(name, value)}" for name, value in named.items()]


def _defined(function: Any) -> tuple[list[str], list[str], str]:
    """Return imports, lines and the name by which the function is called."""
    if isinstance(function, BuiltinFunctionType) and function.__module__:
        return [f"from {function.__module__} import {function.__name__}"], [], function.__name__
    if not isinstance(function, FunctionType):
        raise _Not(f"Calls.attention is a {type(function).__name__}, whose source stands for nothing by itself")
    plain = "<locals>" not in function.__qualname__ and "." not in function.__qualname__
    if plain and not _needs_package(function.__module__):
        folder = Path(inspect.getfile(function)).resolve()
        for _ in function.__module__.split("."):
            folder = folder.parent
        path = [f"sys.path.insert(0, {str(folder)!r})"] if "site-packages" not in folder.parts else []
        return [*path, f"from {function.__module__} import {function.__name__}"], [], function.__name__
    imports: dict[str, None] = {}
    lines: list[str] = []
    _copy(function, imports, lines, set())
    if len(lines) > _MOST_LINES:
        raise _Not(f"its function has {len(lines)} lines: move it into a module that does not import attn_exp")
    return list(imports), lines, function.__name__


def _copy(function: FunctionType, imports: dict[str, None], lines: list[str], seen: set[str]) -> None:
    seen.add(function.__name__)
    values = inspect.getclosurevars(function)
    for name, value in {**values.globals, **values.nonlocals}.items():
        if name in seen or name == "torch":
            continue
        if isinstance(value, ModuleType):
            imports[f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"] = None
        elif isinstance(value, FunctionType) and not value.__module__.startswith("attn_exp"):
            _copy(value, imports, lines, seen)
        else:
            seen.add(name)
            lines.append(f"{name} = {_written(name, value)}")
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise _Not(f"the source of {function.__name__} cannot be read") from error
    tree = ast.parse(text)
    made = tree.body[0]
    if not isinstance(made, ast.FunctionDef):
        raise _Not(f"{function.__name__} is no plain function")
    for node in ast.walk(made):
        # Without docstrings and annotations, which may name what is not imported.
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None and len(node.body) > 1:
                node.body = node.body[1:]
    lines += ast.unparse(made).splitlines()


def _written(name: str, value: Any) -> str:
    plain = isinstance(value, _PLAIN) or (
        isinstance(value, tuple | list) and all(isinstance(one, _PLAIN) for one in value)
    )
    if plain:
        return repr(value)
    if repr(value).startswith("torch."):
        return repr(value)
    raise _Not(f"its function uses {name}, a {type(value).__name__} that cannot be written down")


def _needs_package(module: str) -> bool:
    """Whether a module imports attn_exp."""
    loaded = sys.modules.get(module)
    path = getattr(loaded, "__file__", None)
    if path is None or not str(path).endswith(".py") or importlib.util.find_spec(module) is None:
        return module.startswith("attn_exp") or path is None
    names: list[str] = []
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.split(".")[0] == "attn_exp" for name in names) or module.startswith("attn_exp")
