"""Imports go one way: a zone is a folder, and docs/architecture.md draws the floors that folders are on."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import attn_exp

ROOT = Path(attn_exp.__file__).parent


def floors(process):
    """The folders of one process as docs/architecture.md draws them: one tuple for each floor, from core on."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    (line,) = re.findall(rf"^{process} process: +(.+)$", page, re.MULTILINE)
    return [tuple(floor.split(", ")) for floor in line.split(" <- ")]


def across():
    """The imports between processes that the page allows, as pairs of a module or folder and a folder."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    (line,) = re.findall(r"^across: +(.+)$", page, re.MULTILINE)
    return [tuple(pair.split(" -> ")) for pair in line.split(", ")]


# The child process that measures: these folders may import torch, all others must not, since it takes seconds.
WORKER = {folder for floor in floors("worker")[1:] for folder in floor}
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


def test_every_folder_has_a_floor():
    drawn = [folder for process in ("worker", "parent") for floor in floors(process) for folder in floor]
    assert sorted(drawn) == sorted([*folders(), "core"])


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


def upward(graph):
    """The imports, late ones too, of a folder that is not on a lower floor of the same process."""
    below = {}
    for process in ("worker", "parent"):
        lower = set()
        for floor in floors(process):
            below |= {folder: set(lower) for folder in floor}
            lower |= set(floor)
    allowed = {tuple(pair) for pair in across()}
    found = []
    for name, others in graph.items():
        place, *inside = name.split(".")[1:] or [""]
        for other in others:
            to = (other.split(".") + [""])[1]
            # cli.py, api.py and others at the top may import every folder.
            free = place == to or place not in below or to in below[place]
            if not free and not {(place, to), ("/".join([place, *inside]), to)} & allowed:
                found.append((name, other))
    return found


def test_folders_import_only_lower_floors():
    assert upward(imports()) == []


def upward_in_the_worker(graph):
    """The imports inside of the worker's folder that do not go to the left in the page's line about it."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    (line,) = re.findall(r"^worker: +(.+)$", page, re.MULTILINE)
    order = line.split(" <- ")

    def place(name):
        part = name.removeprefix("attn_exp.worker.").split(".")[0]
        return order.index(part) if part in order else len(order)

    return [
        (name, other)
        for name, others in graph.items()
        for other in others
        if name.startswith("attn_exp.worker.") and other.startswith("attn_exp.worker.") and place(name) < place(other)
    ]


def test_the_worker_s_folder_has_floors_too():
    assert upward_in_the_worker(imports()) == []
    up = {"attn_exp.worker.machine.device": {"attn_exp.worker.attempt"}}
    across = {"attn_exp.worker.check.form": {"attn_exp.worker.prepare", "attn_exp.worker.check.values"}}
    assert len(upward_in_the_worker(up | across)) == 2


def test_the_floors_see_imports_that_go_up_or_across():
    wrong = {
        "attn_exp.core.case": {"attn_exp.config.check"},
        "attn_exp.config.check": {"attn_exp.results.read"},
        "attn_exp.results.read": {"attn_exp.api"},
        "attn_exp.execution.duel": {"attn_exp.worker.measure"},
        "attn_exp.commands.run": {"attn_exp.worker.__main__"},
        "attn_exp.worker.measure": {"attn_exp.results.read"},
        "attn_exp.kernels.launch": {"attn_exp.attention.inputs"},
    }
    right = {
        "attn_exp.api": {"attn_exp.comparison.answer"},
        "attn_exp.commands.worker": {"attn_exp.worker.__main__"},
        "attn_exp.doctor.run_checks": {"attn_exp.results.calibration"},
        "attn_exp.comparison.answer": {"attn_exp.comparison.rivals", "attn_exp.core.case"},
    }
    assert upward(wrong | right) == [(name, other) for name, (other,) in wrong.items()]
