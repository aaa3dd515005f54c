"""bench/public_bugs.py: what it says of a bug that is there, is not, crashes, hangs, or cannot be asked."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import bugs_anywhere
import bugs_cuda
import public_bugs
from public_bugs import Answer, Bug, NotHere


def bug(ask, number=1, **more):
    return Bug(f"pytorch#{number}", "fake", ask, "nothing", **({"devices": ("cpu",)} | more))


def fails(message):
    def ask(device):
        raise RuntimeError(message)

    return ask


def absent(device):
    raise NotHere(f"no such library on a {device}")


def crashes(device):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(device):
    time.sleep(60)


FAKES = {
    1: (bug(lambda device: (True, "off by 3"), 1), Answer("yes", "off by 3")),
    2: (bug(lambda device: (False, "off by 0"), 2), Answer("no", "off by 0")),
    3: (bug(absent, 3), Answer("not applicable", "no such library on a cpu")),
    4: (bug(fails("out of cheese\nmore"), 4), Answer("unknown", "RuntimeError: out of cheese more")),
    5: (bug(fails("out of cheese"), 5, raises="of cheese"), Answer("yes", "RuntimeError: out of cheese")),
    6: (bug(crashes, 6), Answer("unknown", "the process was killed by SIGSEGV")),
    7: (bug(crashes, 7, ends=True), Answer("yes", "the process was killed by SIGSEGV")),
    8: (bug(hangs, 8), Answer("unknown", "the process had not returned after 2 s")),
    9: (bug(fails("never asked"), 9, devices=("cuda",)), Answer("not applicable", "reported of cuda")),
}


@pytest.fixture(scope="module")
def told():
    before = public_bugs._LIMIT_S
    public_bugs._LIMIT_S = 2.0
    try:
        return {
            one.name: answer for one, answer in public_bugs.answers([one for one, _ in FAKES.values()], "cpu", 3, 60)
        }
    finally:
        public_bugs._LIMIT_S = before


@pytest.mark.parametrize("number", FAKES)
def test_each_outcome_is_one_answer(told, number):
    assert told[f"pytorch#{number}"] == FAKES[number][1]


def test_what_the_time_did_not_suffice_for_is_unknown():
    bugs = [bug(hangs, 1), bug(hangs, 2)]
    assert {answer for _, answer in public_bugs.answers(bugs, "cpu", 1, 0.5)} == {
        Answer("unknown", "the time was over")
    }


def test_the_table_has_a_row_a_bug_with_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bugs_anywhere, "ANYWHERE", (FAKES[1][0], FAKES[2][0]))
    monkeypatch.setattr(bugs_cuda, "CUDA", (FAKES[9][0],))
    path = tmp_path / "bugs.md"
    assert public_bugs.main(["--device", "cpu", "--markdown", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert torch.__version__ in lines[-1]
    assert sorted(line.split()[:2] for line in lines[:-1]) == [
        ["pytorch#1", "yes"],
        ["pytorch#2", "no"],
        ["pytorch#9", "not"],
    ]
    assert all("https://github.com/pytorch/pytorch/issues/" in line for line in lines[:-1])
    assert [line.split("|")[3].strip() for line in path.read_text().splitlines()[4:]] == ["yes", "no", "not applicable"]


def test_every_report_has_an_address_and_one_entry():
    bugs = (*bugs_anywhere.ANYWHERE, *bugs_cuda.CUDA)
    assert len({one.url for one in bugs}) == len(bugs)
    assert all(one.what and one.ours for one in bugs)


SMALL = ("masked_tail", "one_query", "decoding", "mask_gradient")


@pytest.mark.parametrize("name", SMALL)
def test_a_right_kernel_does_not_have_the_bugs_of_gpus(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        bugs_cuda, "forced", lambda backend, *operands, **more: bugs_anywhere.forced(SDPBackend.MATH, *operands, **more)
    )
    there, seen = getattr(bugs_cuda, name)("cpu")
    assert not there, seen


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_kernel_has_them(name, monkeypatch):
    def broken(backend, *operands, **more):
        out = bugs_anywhere.forced(SDPBackend.MATH, *operands, **more)
        if backend != SDPBackend.MATH and out.requires_grad:
            out.register_hook(lambda gradient: gradient * torch.nan)
        return out if backend == SDPBackend.MATH else out * 3

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bugs_cuda, "forced", broken)
    there, seen = getattr(bugs_cuda, name)("cpu")
    assert there, seen
