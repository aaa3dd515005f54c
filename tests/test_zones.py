"""Imports go one way: a zone is a folder, and this test compares folders."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import attn_exp

ROOT = Path(attn_exp.__file__).parent
# The child process that measures: these folders may import torch, all others must not, since it takes seconds.
WORKER = {"attention", "backends", "doctor", "kernels", "profilers", "timers", "worker", "workloads"}
# Imports every module named on the command line, in order, and prints what each brought in of the heavy packages.
_PROBE = """
import importlib, json, sys
heavy = ("torch", "hydra", "omegaconf", "mlflow", "numpy", "pandas", "matplotlib", "sqlite3", "tabulate", "jinja2")
seen, imported = set(), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    imported[name] = [package for package in heavy if package in sys.modules and package not in seen]
    seen.update(imported[name])
print(json.dumps(imported))
"""


def modules(*folders):
    """The names of all modules in these folders of the package, or in the whole package."""
    paths = [path for path in ROOT.rglob("*.py") if not folders or path.relative_to(ROOT).parts[0] in folders]
    names = [".".join(("attn_exp", *path.relative_to(ROOT).with_suffix("").parts)) for path in sorted(paths)]
    return [name.removesuffix(".__init__") for name in names]


def heavy_imports(names):
    """The heavy packages that importing these modules brings in, by the module that was first to import each."""
    ran = subprocess.run([sys.executable, "-c", _PROBE, *names], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {name: packages for name, packages in json.loads(ran.stdout.splitlines()[-1]).items() if packages}


def folders():
    return {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}


def test_core_imports_nothing_heavy():
    assert heavy_imports(modules("core")) == {}


def test_comparing_imports_nothing_heavy():
    assert heavy_imports(modules("results", "compare")) == {}


def test_no_folder_outside_the_worker_imports_torch():
    names = [name for name in modules() if name.split(".")[1:2] not in [[zone] for zone in WORKER]]
    assert {name for name, packages in heavy_imports(names).items() if "torch" in packages} == set()


def test_every_folder_of_the_worker_is_there():
    assert folders() >= WORKER


def test_the_probe_sees_torch_where_it_is():
    assert "torch" in heavy_imports(["attn_exp.core.case", "attn_exp.attention.inputs"])["attn_exp.attention.inputs"]


def imports():
    """The modules of the package that each one imports, also inside of functions; not those for type checkers only."""
    names = modules()
    paths = {name: ROOT.joinpath(*name.split(".")[1:]) for name in names}
    graph = {}
    for name, path in paths.items():
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        typing = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        skipped = {id(inner) for node in typing for body in node.body for inner in ast.walk(body)}
        graph[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and id(node) not in skipped:
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and id(node) not in skipped:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (inside & set(names)) or {node.module}
        graph[name] &= set(names) - {name}
    return graph


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter(imports()).prepare()


def test_no_folder_imports_itself_through_others():
    graph = {}
    for name, others in imports().items():
        # python -m attn_exp.FOLDER starts a command, which may use every folder.
        if not name.endswith(".__main__"):
            place = name.split(".")[1:2]
            graph.setdefault(tuple(place), set()).update(
                tuple(to) for other in others if (to := other.split(".")[1:2]) != place
            )
    assert {"core", "compare", "plots"} <= {name for place in graph for name in place}
    graphlib.TopologicalSorter(graph).prepare()
