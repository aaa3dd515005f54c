"""The source of a user's backend: what it covers, which job it makes, and that no process measures another one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cli
import fakes
import pytest
import sweeps

from attn_exp import compare
from attn_exp.config.request import _identity
from attn_exp.core import source
from attn_exp.core.source import described, identity, source_of
from attn_exp.execution.job_queue import JobQueue
from attn_exp.execution.worker import Worker
from attn_exp.results.read import read_folder
from attn_exp.results.store import done_record
from attn_exp.results.table import csv_text
from attn_exp.worker import loaded

ROOT = Path(__file__).resolve().parent.parent
MINE = """
from functools import partial
import helper_of_mine
from attn_exp.backends.base import calls_of
from torch.nn.functional import scaled_dot_product_attention as sdpa

class Mine:
    def __init__(self, name):
        self.name = name
    def unsupported(self, case, device):
        return None
    def prepare(self, case, inputs):
        print("this is", helper_of_mine.WHICH)
        return calls_of(partial(sdpa, is_causal=case.causal, enable_gqa=case.q_heads != case.kv_heads), inputs)
    def claimed_kernels(self, direction, device):
        return None
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with a module of the user's."""
    (tmp_path / "mine_here.py").write_text(MINE)
    (tmp_path / "helper_of_mine.py").write_text("WHICH = 'the first'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loaded, "_loaded", {})
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    return tmp_path


def hash_of(target="mine_here.Mine"):
    return source_of(target).facts["sha256"]


def names(target):
    found = source_of(target)
    return sorted(path.relative_to(found.root).as_posix() for path in found.files)


def package(place):
    for path, text in {
        "pack/__init__.py": "raise SystemExit('the parent runs no code of a user')\n",
        "pack/near/__init__.py": "",
        "pack/near/attention.py": "from ..far import tool\n",
        "pack/near/kernel.cu": "// cuda\n",
        "pack/near/notes.txt": "text\n",
        "pack/far/tool.py": "import torch\n",
    }.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)


@pytest.mark.parametrize("target", ["mine_here.Mine", "mine_here:Mine"])
def test_a_module_counts_with_what_it_imports_from_its_folder_and_names(place, target):
    (place / "mine_here.py").write_text(MINE + "SOURCES = ['kernels/a.cu', '/etc/hosts.h', 'b.cpp']\n")
    (place / "kernels").mkdir()
    (place / "kernels" / "a.cu").write_text("// cuda\n")
    (place / "unrelated.py").write_text("")
    assert names(target) == ["helper_of_mine.py", "kernels/a.cu", "mine_here.py"]


@pytest.mark.parametrize("target", ["pack.near.attention.Mine", "pack.near.attention:A.B"])
def test_a_package_counts_as_a_whole_and_none_of_it_runs(place, target):
    package(place)
    assert names(target) == [
        *("pack/__init__.py", "pack/far/tool.py", "pack/near/__init__.py", "pack/near/attention.py"),
        "pack/near/kernel.cu",
    ]
    assert source_of(target).facts["module"] == "pack.near.attention"
    before = hash_of(target)
    (place / "pack" / "near" / "notes.txt").write_text("other text\n")
    assert hash_of(target) == before
    (place / "pack" / "near" / "kernel.cu").write_text("// other\n")
    assert hash_of(target) != before


@pytest.mark.parametrize("packages", [True, False])
def test_a_module_two_folders_deep_is_found_with_and_without_an_init_file(packages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "deep_exp" / "kernels"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("class B: pass\n")
    for parent in (folder, folder.parent) if packages else ():
        (parent / "__init__.py").touch()
    assert described("deep_exp.kernels.mine.B")["module"] == "deep_exp.kernels.mine"


@pytest.mark.parametrize("target", ["attn_exp.backends.eager.Eager", "no_such_module.Mine", "sys.Mine", "a b"])
def test_ours_and_what_is_not_there_has_no_source(place, target):
    assert source_of(target) is None
    assert described("attn_exp.backends.eager.Eager") == {}


def test_a_folder_on_the_path_is_searched_before_the_current_one(place, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    (other / "mine_here.py").write_text("")
    (other / "theirs_here.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(other))
    assert source_of("mine_here.Mine").root == other
    assert source_of("theirs_here.Mine").root == other


def test_an_installed_package_has_a_version():
    facts = described("numpy.linalg.Mine")
    assert facts["package"].startswith("numpy==") and "commit" not in facts


def test_a_checkout_has_a_commit_and_says_whether_files_differ_from_it(place):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    assert "commit" not in described("mine_here.Mine")
    for words in (["init", "-q"], ["add", "mine_here.py", "helper_of_mine.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    # What was asked before is remembered as long as no file changes: another process asks anew.
    source._checkout.cache_clear()
    committed = described("mine_here.Mine")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (committed["commit"], committed["changes"]) == (head, "none")
    # Programs that a foreign repository names: none of them runs.
    (place / ".gitattributes").write_text("*.py filter=mine\n")
    for name in ("filter.mine.clean", "core.fsmonitor"):
        subprocess.run(["git", "config", name, f"touch {place / 'ran'}; cat"], check=True)
    (place / "unrelated.py").write_text("")
    (place / "helper_of_mine.py").write_text("WHICH = 'another one'\n")
    changed = described("mine_here.Mine")
    assert (changed["commit"], changed["changes"]) == (head, "uncommitted")
    assert source.commit(changed) == f"{head}-dirty"
    assert not (place / "ran").exists()
    assert identity(changed) == {"sha256": changed["sha256"]} != identity(committed)


def test_another_source_is_another_job_and_no_source_the_job_that_it_was():
    made = fakes.make_request({"_target_": "mine_here.Mine", "name": "mine"})
    sources = ({}, {"sha256": "a"}, {"sha256": "b"}, {"sha256": "a", "commit": "c"})
    jobs = [_identity(replace(made, source=given)) for given in sources]
    assert len(set(jobs)) == 3 and jobs[1] == jobs[3]


def request(place, job="mine-0"):
    made = fakes.make_request({"_target_": "mine_here.Mine", "name": "mine"}, passes=("forward",))
    return replace(made, job=job, source=described("mine_here.Mine"))


def test_a_changed_file_is_not_measured_with_the_module_that_was_loaded_before(place):
    folder = place / "multirun"
    folder.mkdir()
    worker = Worker(reuse=True, timeout_s=120)
    queue = JobQueue(worker, folder)
    try:
        ends, processes = [], []
        for job, which in (("a", None), ("b", None), ("c", "the second one"), ("d", None)):
            if which:
                (place / "helper_of_mine.py").write_text(f"WHICH = {which!r}\n")
            queue.submit([request(place, job)])
            ends.append(queue.record(queue.wait()))
            processes.append(worker._process.pid)
    finally:
        worker.close()
    assert [(end.status, end.reason) for end in ends] == [("ok", None)] * 4
    said = [(folder / job / "worker.log").read_text() for job in "abcd"]
    assert ["the first" in text for text in said] == [True, True, False, False]
    assert ["the second one" in text for text in said] == [False, False, True, True]
    assert processes[0] == processes[1] != processes[2] == processes[3]
    # The first one's record is not that of the file as it is now.
    assert done_record(ends[1].request, folder / "b") is not None
    assert done_record(request(place, "b"), folder / "b") is None


SAVES = """
from pathlib import Path
from attn_exp.backends.eager import Eager

class Saves(Eager):
    def prepare(self, case, inputs):
        Path(__file__).write_text(Path(__file__).read_text() + "# again")
        return super().prepare(case, inputs)
"""


def test_a_sweep_ends_when_a_backend_s_file_is_saved(tmp_path):
    (tmp_path / "saving.py").write_text(SAVES)
    words = ("backend._target_=saving.Saves", "~backend.name", "batch=1,2,3", "sweep=night")
    done = cli.run("-m", *words, *(word for word in cli.QUICK if word != "batch=1"), cwd=tmp_path)
    assert (done.returncode, "the files of backend saves were changed while the sweep ran" in done.stderr) == (2, True)
    (record,) = cli.records(tmp_path, "night").values()
    assert record.status == "ok"


def of_source(sha256, us, **more):
    made = sweeps.job("mine", us, **more)
    facts = {"sha256": sha256 * 64, "commit": "c" * 40, "changes": "uncommitted"} if sha256 else {}
    return replace(made, request=replace(made.request, job=f"mine-{sha256 or 'none'}", source=facts))


def test_two_sources_in_a_sweep_are_two_rivals(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))
    records = [of_source("a", 100.0), of_source("b", 50.0), of_source("", 70.0), sweeps.job("flash", 80.0)]
    found = compare(sweeps.write(tmp_path / "s", records))
    assert {row.cell.result.label for row in found.rows} == {"mine@aaaaaaa", "mine@bbbbbbb", "mine@unknown", "flash"}
    assert not any("measured again" in note for note in found.notes)
    text = csv_text(read_folder(tmp_path / "s").results)
    assert "aaaaaaaaaaaaaaaa," + "c" * 40 + "-dirty" in text


def test_the_same_backend_at_two_sources_is_compared_and_the_difference_told(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))
    old, new = (
        sweeps.write(tmp_path / name, [of_source(name, us), sweeps.job("flash", 80.0)])
        for name, us in (("a", 100.0), ("b", 50.0))
    )
    found = compare(new, against=old)
    assert {row.cell.result.label for row in found.rows} == {"mine", "flash"}
    told = [str(one) for one in found.differences if "source" in one.name]
    assert told == ["source of mine aaaaaaa -> bbbbbbb"]
