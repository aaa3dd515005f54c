"""The pins of constraints.txt fit together, and pyproject.toml, by what the package index says of each."""

import ast
import json
import sys
import tomllib

import pins
import pytest

PINS, PROJECT = pins.read_pins(), pins.read_project()
KNOWN = json.loads(pins.FIXTURE.read_text())


@pytest.mark.parametrize("python", pins.PYTHONS)
def test_the_pins_fit_together_and_fit_pyproject(python):
    problems, _ = pins.check(PINS, KNOWN, PROJECT, python)
    assert problems == []


def test_no_pin_is_superfluous():
    required = {name for python in pins.PYTHONS for name in pins.check(PINS, KNOWN, PROJECT, python)[1]}
    assert set(PINS) - required == set(), "nothing requires these: delete them from constraints.txt"


def test_the_fixture_has_an_entry_of_each_pin_and_no_other():
    pinned = {f"{name}=={version}" for name, version in PINS.items()}
    assert set(KNOWN) == pinned, f"{pins.FIXTURE.name} was made from other pins: run `{pins.COMMAND}`"


def test_a_triton_that_torch_does_not_take_is_reported():
    known = KNOWN | {"triton==3.6.0": {"python": ">=3.10,<3.15", "requires": []}}
    problems, _ = pins.check(PINS | {"triton": "3.6.0"}, known, PROJECT, "3.12")
    assert problems == ["torch==2.13.0 requires triton==3.7.1, but constraints.txt pins 3.6.0"]


def test_a_pin_without_an_entry_is_reported_with_the_command_that_makes_it():
    problems, _ = pins.check(PINS | {"triton": "3.7.1.1"}, KNOWN, ["triton>=3.6"], "3.12")
    assert problems == [
        "pinned_requirements.json does not know what triton==3.7.1.1 requires: run `python tests/pins.py`"
    ]


def test_a_requirement_without_a_pin_is_reported():
    lacking = {name: version for name, version in PINS.items() if name != "sympy"}
    problems, _ = pins.check(lacking, KNOWN, PROJECT, "3.11")
    assert problems == ["torch==2.13.0 requires sympy, which constraints.txt does not pin"]


def test_a_range_of_pyproject_that_excludes_a_pin_is_reported():
    problems, _ = pins.check(PINS, KNOWN, ["torch>=2.14"], "3.11")
    assert "attn_exp requires torch>=2.14, but constraints.txt pins 2.13.0" in problems


def test_a_pin_for_newer_pythons_only_is_reported():
    known = KNOWN | {"msgspec==9": {"python": ">=3.13", "requires": []}}
    problems, _ = pins.check({"msgspec": "9"}, known, ["msgspec"], "3.12")
    assert problems == ["msgspec==9 requires Python >=3.13, not 3.12"]


def test_markers_and_extras_are_evaluated():
    known = {
        "a==1": {"python": "", "requires": ["b; python_version < '3.12'", "c; extra == 'more'", "d; extra == 'other'"]}
    }
    for python, lacking in {"3.11": {"b", "c"}, "3.12": {"c"}}.items():
        problems, _ = pins.check({"a": "1"}, known, ["a[more]"], python)
        assert problems == [f"a==1 requires {name}, which constraints.txt does not pin" for name in sorted(lacking)]


def test_what_is_not_pinned_is_required_at_all():
    every = [*PROJECT, *(text for entry in KNOWN.values() for text in entry["requires"])]
    names = {pins.canonicalize_name(pins.Requirement(text).name) for text in every}
    assert set(pins.CUDA + pins.KERNELS + pins.BROWSER) - names == set()


def test_torch_has_no_upper_bound():
    dependencies = tomllib.loads((pins.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [pins.Requirement(text) for text in dependencies if text.startswith("torch")]
    assert (
        torch.specifier.contains("2.11.0") and torch.specifier.contains("3.0") and not torch.specifier.contains("2.10")
    )


# Distributions that the package imports under another name, and those that come with what an extra, a backend or
# msgspec[yaml] needs, or with the model that a program has (transformers).
IMPORTED_AS = {"hydra-core": "hydra", "nvidia-ml-py": "pynvml"}
OPTIONAL = {"helion", "hypothesis", "pytest", "submitit", "transformers", "triton", "yaml"}


def imported():
    """The top-level packages that the code imports, late imports too, but for the standard library."""
    trees = [ast.parse(path.read_text()) for path in (pins.ROOT / "attn_exp").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"attn_exp"}


def test_the_package_requires_what_it_imports_and_nothing_else():
    dependencies = tomllib.loads((pins.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {pins.canonicalize_name(pins.Requirement(text).name) for text in dependencies}
    assert {IMPORTED_AS.get(name, name) for name in names} == imported() - OPTIONAL
