"""Every record says which code measured it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_exp.core import provenance
from attn_exp.core.provenance import git_commit, measuring, syntax, tree
from attn_exp.worker.machine.environment import environment

ROOT = Path(__file__).resolve().parents[1]


def git(folder, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def forget():
    for function in (git_commit, tree, measuring, provenance._head):
        function.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A checkout of a small package, seen from another folder."""
    monkeypatch.delenv("ATTN_EXP_TREE", raising=False)
    made = tmp_path / "checkout" / "attn_exp"
    (made / "timers").mkdir(parents=True)
    (made / "timers" / "a.py").write_text('"""A timer."""\nx = [1, 2]\n')
    (made / "cli.py").write_text("y = 1\n")
    git(made.parent, "init", "-q")
    git(made.parent, "add", ".")
    git(made.parent, "commit", "-qm", "one")
    monkeypatch.chdir(tmp_path)
    forget()
    yield made
    forget()


def test_a_clean_checkout_names_its_tree_and_commit_from_any_folder(package):
    assert tree(package) == git(package.parent, "rev-parse", "HEAD:attn_exp")
    assert git_commit(package) == git(package.parent, "rev-parse", "HEAD")
    # What lies outside of the package does not make it another one.
    (package.parent / "notes.txt").write_text("text")
    forget()
    assert not tree(package).startswith("files:")


@pytest.mark.parametrize("name", ["cli.py", "new.py"])
def test_a_changed_package_is_named_by_its_files(package, name):
    (package / name).write_text("y = 2\n")
    changed = tree(package)
    assert changed.startswith("files:") and len(changed) == len("files:") + 16
    (package / name).write_text("y = 3\n")
    forget()
    assert tree(package) != changed


def test_without_a_checkout_the_variable_names_the_tree_else_the_files(package, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_TREE", "told")
    assert tree(package) != "told"
    shutil.rmtree(package.parent / ".git")
    forget()
    assert (tree(package), git_commit(package)) == ("told", None)
    monkeypatch.delenv("ATTN_EXP_TREE")
    forget()
    assert tree(package).startswith("files:")


def test_a_checkout_around_the_package_says_nothing_of_it(package):
    for place in ("mine/attn_exp", "lib/site-packages/attn_exp"):
        shutil.copytree(package, package.parent / place)
    git(package.parent, "add", "lib")
    git(package.parent, "commit", "-qm", "two")
    for place in ("mine/attn_exp", "lib/site-packages/attn_exp"):
        assert git_commit(package.parent / place) is None
        assert tree(package.parent / place).startswith("files:")


def test_git_runs_nothing_that_the_checkout_names(package, tmp_path):
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    monitor.chmod(0o755)
    git(package.parent, "config", "core.fsmonitor", str(monitor))
    assert tree(package) and git_commit(package)
    assert not (tmp_path / "ran").exists()


def test_only_the_syntax_of_what_measures_counts(package):
    before = measuring(package)
    (package / "cli.py").write_text("y = 5\n")
    (package / "timers" / "a.py").write_text('"""Other words."""\n\nx = [\n    1,\n    2,  # two\n]\n')
    forget()
    assert measuring(package) == before
    (package / "timers" / "a.py").write_text("x = [1, 3]\n")
    forget()
    assert measuring(package) != before


def test_docstrings_do_not_count_and_other_texts_do():
    assert syntax("def f():\n    'a'\n    return 1") == syntax("def f():\n    return 1")
    assert syntax("x = 'a'") != syntax("x = 'b'")
    assert syntax("return_ = None") != syntax("return_: None")
    assert syntax("f(a, *b)") != syntax("f(a, b)")


def test_the_measuring_code_is_found_and_a_record_s_environment_has_it(monkeypatch):
    found = {path for name in provenance._MEASURES for path in (ROOT / "attn_exp").glob(name)}
    assert {"timers", "stats", "measure.py"} <= {path.name for path in found}
    monkeypatch.chdir(os.sep)
    here = environment("cpu")
    assert here["measuring"] == measuring() and here["tree"] == tree()


def evidence(checkout, **variables):
    """Run a step of bench/evidence.sh that does not exist, which is refused after the tree."""
    env = {name: value for name, value in os.environ.items() if name != "ATTN_EXP_TREE"} | variables
    command = ["bash", str(checkout / "bench" / "evidence.sh"), str(checkout / "out"), "nothing"]
    ran = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    return ran.stderr


def test_evidence_is_measured_by_a_committed_tree_only(package):
    checkout, accepted = package.parent, "there is no step nothing"
    (checkout / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "evidence.sh", checkout / "bench")
    assert "differ from the commit" in evidence(checkout, ATTN_EXP_TREE="told")
    git(checkout, "add", "bench")
    git(checkout, "commit", "-qm", "two")
    (checkout / "notes.txt").write_text("text")
    assert accepted in evidence(checkout)
    (package / "cli.py").write_text("y = 2\n")
    assert "differ from the commit" in evidence(checkout)
    shutil.rmtree(checkout / ".git")
    assert "set ATTN_EXP_TREE" in evidence(checkout)
    assert accepted in evidence(checkout, ATTN_EXP_TREE="told")
