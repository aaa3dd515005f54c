"""Bisection: the search with simulated times, packages made here, bad input."""

import base64
import hashlib
import json
import math
import random
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn_exp.bisect import measuring
from attn_exp.bisect.search import Round, decided, search
from attn_exp.bisect.versions import packages
from attn_exp.commands import bisect

MODULE = """
import time

from attn_exp.backends.eager import Eager

class Attention(Eager):
    def prepare(self, case, inputs):
        from dataclasses import replace

        calls = super().prepare(case, inputs)

        def forward():
            until = time.perf_counter() + {us} / 1e6
            out = calls.forward()
            while time.perf_counter() < until:
                pass
            return out

        return replace(calls, forward=forward)
"""


class Simulated:
    """Versions whose times are known, with noise of `noise` a round that both sides do not share.

    The last version has the noise `worst`, if that is given.
    """

    def __init__(self, effects, noise=0.003, seed=1, broken=(), canary=0.0, worst=None):
        self.worst = noise if worst is None else worst
        self.effects, self.noise, self.broken, self.canary = effects, noise, broken, canary
        self.random = random.Random(seed)
        self.rounds, self.measured = {}, []

    def __call__(self, index, rounds):
        if index in self.broken:
            return "it does not install"
        kept = self.rounds.setdefault(index, [])
        if not kept:
            self.measured.append(index)
        while len(kept) < rounds:
            noise = self.random.gauss(0, self.worst if index == len(self.effects) - 1 else self.noise)
            kept.append(Round(math.log1p(self.effects[index]) + noise, self.canary + self.random.gauss(0, 0.0005)))
        return kept

    def search(self, margin=0.01):
        return search(len(self.effects), self, margin, lambda index, text: None)


@pytest.mark.parametrize("at", [1, 7, 12, 19])
def test_three_percent_of_twenty_versions_are_found_in_log2_steps(at):
    wrong = 0
    for seed in range(40):
        simulated = Simulated([0.0] * at + [0.03] * (20 - at), seed=seed)
        found = simulated.search()
        wrong += found.kind == "found" and found.bad != at
        assert (found.kind, found.good) == ("found", at - 1) or found.kind == "undecided"
        assert len(simulated.measured) <= 1 + math.ceil(math.log2(19))
        if seed == 0:
            assert (found.kind, found.good, found.bad) == ("found", at - 1, at)
            assert found.effect == pytest.approx(0.03, abs=0.004)
    assert wrong == 0


def test_ends_that_do_not_differ_are_told_and_nothing_else_is_measured():
    for effect in (0.0, 0.005, -0.005):
        simulated = Simulated([0.0] * 9 + [effect])
        assert simulated.search().kind == "same"
        assert simulated.measured == [9]


@pytest.mark.parametrize(("effect", "noise"), [(0.64, 2.0), (0.0, 0.2), (-0.03, 0.003)])
def test_ends_are_equal_only_if_their_interval_lies_within_the_margin(effect, noise):
    found = Simulated([0.0] * 9 + [effect], noise=noise).search()
    low, high = (float(word) for word in re.findall(r"[+-][\d.]+", found.reason))
    assert found.kind == "undecided"
    assert low < 100 * effect < high


@pytest.mark.parametrize("worst", [2.0, 0.1])
def test_a_badly_measured_end_is_no_bar(worst):
    found = [Simulated([0, 0, 14, 14], noise=2.0, worst=worst, seed=seed).search() for seed in range(40)]
    # Where the ends themselves are told apart.
    told = [one for one in found if not one.reason.startswith("the bad end")]
    right = [one for one in told if (one.kind, one.good, one.bad) == ("found", 1, 2)]
    assert (len(told) >= 30, len(right) / len(told) > 0.75) == (True, True)


def test_versions_that_cannot_be_measured_are_skipped():
    near = Simulated([0.0] * 12 + [0.03] * 8, broken=(9, 10)).search()
    assert (near.kind, near.good, near.bad, near.skipped) == ("found", 11, 12, ())
    at = Simulated([0.0] * 12 + [0.03] * 8, broken=(11, 12)).search()
    assert (at.kind, at.good, at.bad) == ("found", 10, 13)
    assert [index for index, _ in at.skipped] == [11, 12]
    end = Simulated([0.0] * 3 + [0.03], broken=(3,)).search()
    assert (end.kind, end.reason) == ("undecided", "the bad end cannot be measured: it does not install")


def test_a_canary_that_moves_as_well_is_no_regression():
    found = Simulated([0.0] * 5 + [0.03] * 5, canary=0.03).search()
    assert (found.kind, "canary" in found.reason) == ("undecided", True)


@dataclass
class SimpleRequest:
    """A request that only has a label."""

    label: str


class Placed:
    """A worker whose memory's place makes its calls faster or slower by 0.8 %."""

    random = random.Random(3)

    def __init__(self, python, folder, requests):
        self.place, self.worker = self.random.gauss(0, 0.008), self

    def time(self, name, direction):
        return 100 * math.exp(self.place + self.random.gauss(0, 0.001))

    def close(self):
        pass


def test_the_place_of_a_process_in_memory_is_no_regression(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "Side", Placed)
    versions = SimpleNamespace(names=("mine==1", "mine==2"), label=str, environment=lambda index, folder: "python")
    found = []
    for number in range(30):
        sides = measuring.SideBySide(versions, {"case": SimpleRequest("case")}, "forward", tmp_path / str(number), {})
        found.append(decided(sides.measure(1, 32), 0.0))
    assert found.count(None) >= 28


def wheel(folder, version, us, name="slowly", broken=False, module=MODULE):
    """Write a wheel by hand: a module and three files of metadata."""
    files = {
        f"{name}.py": module.format(us=us),
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + ("Requires-Dist: not-there-at-all\n" if broken else ""),
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for path, text in files.items()
    ]
    listed = f"{name}-{version}.dist-info/RECORD"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(listed, "\n".join([*record, f"{listed},,"]) + "\n")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Twenty versions, of which the thirteenth and later ones take twice the time; one does not install."""
    folder = tmp_path_factory.mktemp("wheels")
    for number in range(20):
        version = f"1.0b{number}" if number < 15 else f"1.{number}"
        # Shorter than what a busy machine gives a process at once.
        wheel(folder, version, 300 if number < 12 else 600, broken=number == 11)
    return folder


def test_versions_of_a_folder_are_in_order_and_have_pre_releases(wheels):
    found = packages("slowly==1.0b3", "slowly==1.15", wheels)
    assert found.names == (*(f"1.0b{number}" for number in range(3, 15)), "1.15")
    assert found.label(0) == "slowly==1.0b3"


def test_a_package_is_searched_and_goes_on(wheels, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Tests run on busy machines, where a job's fastest call is the one that was not interrupted.
    monkeypatch.setattr("attn_exp.bisect.measuring.METRIC", "time_min_us")
    monkeypatch.setattr(bisect, "_CANARIES", {"cpu": ("backend=eager", "dtype=fp32", "seq_len=16")})
    monkeypatch.setattr("attn_exp.bisect.search.LOOKS", (4, 8, 16))
    # A start takes 3 s; the times of these versions are so far apart that it does not matter where their memory lies.
    monkeypatch.setattr("attn_exp.bisect.measuring.ROUNDS_OF_A_PROCESS", 100)
    small = ["model.q_heads=1", "model.kv_heads=1", "model.head_dim=16", "seq_len=16", "dtype=fp32", "device=cpu",
             "stopping.budget_s=0.02"]  # fmt: skip
    words = ["good=slowly==1.0b10", "bad=slowly==1.0b13", f"wheels={wheels}", "backend._target_=slowly.Attention",
             "state=state", *small]  # fmt: skip
    code = bisect.main(words)
    out = capsys.readouterr().out
    assert (code, out.splitlines()[-1].split(";")[0]) == (
        0,
        "the first slow one is slowly==1.0b12 or one that was skipped before it: slowly==1.0b11",
    ), out
    assert "slowly==1.0b11: skipped: " in out
    state = json.loads(Path("state/state.json").read_text())
    assert len(state["rounds"]) <= 4
    # The same command again has all rounds, and starts nothing.
    monkeypatch.setattr("attn_exp.bisect.measuring.Side", None)
    assert bisect.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
    assert bisect.main([*words, "causal=false"]) == 2
    assert "has a bisection of something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a bisection needs two ends"),
        (["good=slowly", "bad=slowly==1.19"], "are not of the form NAME==VERSION"),
        (["good=slowly==1.0b0", "bad=other==1"], "give two versions of one package"),
        (["good=slowly==0.1", "bad=slowly==1.19"], "there is no slowly==0.1 in"),
        (["good=slowly==1.0b0", "bad=slowly==1.19", "backend=flsh", "device=cpu"], "flsh"),
        (["good=slowly==1.0b0", "bad=slowly==1.19", "passes=[step]"], "write pass=forward or pass=backward"),
        (["good=slowly==1.0b11", "bad=slowly==1.19", "device=cpu"], "the good end cannot be measured: ERROR"),
    ],
)
def test_a_mistake_is_one_sentence(wheels, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bisect.main([*words, *([f"wheels={wheels}"] if any("slowly" in word for word in words) else [])]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] in ([], ["bisects"])
