"""What duels decided flows back into the answer of the sweep that they lie beside."""

import json
from dataclasses import replace

import msgspec
import pytest
import sweeps

from attn_exp import compare
from attn_exp.comparison.pages import page
from attn_exp.comparison.standing import standings
from attn_exp.core.record.file import VERDICTS_NAME
from attn_exp.core.record.request import DUEL_NAME
from attn_exp.core.sheet.render import text_of


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXP_STATE", str(tmp_path / "state"))


def duel(home, a, b, effect, verdict, *, half=0.01, at=1.0, name="duel-1", directions=("forward",), **changes):
    """The folder of a duel of two records: b takes `effect` more time than a."""
    rivals = []
    for letter, record in (("a", a), ("b", b)):
        request = replace(record.request, job=f"{letter}-{record.request.job}", label=f"{letter}={letter}")
        rivals.append(replace(record, request=request, finished_at=sweeps.NOON + at, **changes))
    folder = sweeps.write(home / name, rivals)
    (folder / DUEL_NAME).write_bytes(msgspec.yaml.encode([one.request for one in rivals]))
    pair = {"a": rivals[0].request.label, "b": rivals[1].request.label, "effect": effect, "low": effect - half,
            "high": effect + half, "p": 0.001, "rounds": 9, "margin": 0.01, "verdict": verdict}  # fmt: skip
    (folder / VERDICTS_NAME).write_text(json.dumps({direction: [pair] for direction in directions}))
    return folder


def tied(**more):
    return [sweeps.job("cudnn", 100.0, None, **more), sweeps.job("flash", 100.2, None), sweeps.job("math", 300.0, None)]


def best(found):
    return sorted(row.label for row in found.rows if row.best)


def lead(found):
    own = found.answer.lead
    return own.over, *(round(value, 2) for value in (own.value, own.low, own.high))


def decided(found):
    return [row for row in found.rows if row.duels]


def test_a_pair_that_a_duel_decided_is_a_sure_pick_with_the_duels_ratio_in_every_place(tmp_path):
    cudnn, flash, math = tied()
    folder = sweeps.write(tmp_path / "s", (cudnn, flash, math))
    before = compare(folder)
    assert before.answer.ties == 1 and len(before.ties) == 1
    # The slower one in the sweep is the faster one side by side.
    duel(tmp_path, cudnn, flash, -0.04, "slower")
    found = compare(folder)
    assert found.answer.ties == 0 and found.ties == () and best(found) == ["flash"]
    assert lead(found) == ("cudnn", 1.04, 1.03, 1.05)
    for form in ("table", "markdown", "json", "html"):
        said = " ".join(text_of(page(found), form).split())
        assert "duels beside the sweep decided what intervals leave too close to call" in said
    ranks = {job.partition("-")[0]: own["forward/rank"] for job, own in standings(found).of_jobs.items()}
    assert (ranks["flash"], ranks["cudnn"]) == (1, 2)
    # Duels are of times: another metric takes no notice of them.
    assert not decided(compare(folder, metric="peak_memory_bytes"))
    assert compare(folder, metric="tflops").ties == ()


def test_equivalent_backends_are_one_pick_and_need_no_second_duel(tmp_path):
    cudnn, flash, math = tied()
    folder = sweeps.write(tmp_path / "s", (cudnn, flash, math))
    duel(tmp_path, cudnn, flash, 0.001, "equivalent", half=0.005)
    found = compare(folder)
    assert best(found) == ["cudnn", "flash"]
    assert found.answer.ties == 0 and lead(found) == ("math", 3.0, 2.97, 3.03)
    assert [row.equal for row in found.rows if row.duels] == [{"flash"}, {"cudnn"}]


def test_a_wide_row_of_which_a_duel_decided_wins_or_loses(tmp_path):
    def found(name, effect, verdict):
        records = [sweeps.job("cudnn", 100.0, None), sweeps.job("flash", 97.0, None, half=0.1, flags=("unstable",)),
                   sweeps.job("math", 300.0, None)]  # fmt: skip
        folder = sweeps.write(tmp_path / name / "s", records)
        assert compare(folder).answer.ties == 1
        duel(tmp_path / name, records[0], records[1], effect, verdict)
        return compare(folder)

    slower = found("slower", 0.03, "faster")
    assert best(slower) == ["cudnn"] and lead(slower) == ("flash", 1.03, 1.02, 1.04)
    faster = found("faster", -0.03, "slower")
    assert best(faster) == ["flash"] and lead(faster) == ("cudnn", 1.03, 1.02, 1.04)
    undecided = found("undecided", 0.0, "undecided")
    assert undecided.answer.ties == 1 and len(undecided.ties) == 1


def test_the_next_pair_of_three_is_proposed_until_all_are_decided(tmp_path):
    records = [sweeps.job(name, us, None) for name, us in (("cudnn", 100.0), ("flash", 100.1), ("math", 100.2))]
    folder = sweeps.write(tmp_path / "s", records)
    pairs = []
    for number in range(3):
        found = compare(folder)
        if not found.ties:
            break
        (one,) = found.ties
        of = {record.request.backend["name"]: record for record in records}
        pairs.append((one.a.result.label, one.b.result.label))
        duel(tmp_path, of[pairs[-1][0]], of[pairs[-1][1]], 0.02, "faster", name=f"duel-{number}", at=number)
    assert len(pairs) == 2 and len(set(pairs)) == 2
    assert best(found) == ["cudnn"] and found.answer.ties == 0 and len(decided(found)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": sweeps.H200 | {"gpu": "NVIDIA H100"}},
        {"environment": sweeps.H200 | {"versions": {"torch": "2.12.0"}}},
        {"status": "error", "reason": "no luck", "metrics": {}},
    ],
)
def test_a_duel_on_another_machine_or_of_other_versions_decides_nothing_here(tmp_path, changes):
    cudnn, flash, math = tied()
    folder = sweeps.write(tmp_path / "s", (cudnn, flash, math))
    duel(tmp_path, cudnn, flash, 0.04, "faster", **changes)
    assert not decided(compare(folder)) and len(compare(folder).ties) == 1


def test_a_duel_of_another_pass_case_or_option_decides_nothing_here_and_the_latest_counts(tmp_path):
    cudnn, flash, math = tied()
    folder = sweeps.write(tmp_path / "s", (cudnn, flash, math))
    duel(tmp_path, cudnn, flash, 0.04, "faster", name="duel-pass", directions=("backward",))
    other = [sweeps.job(name, 100.0, None, of=sweeps.case(seq_len=64)) for name in ("cudnn", "flash")]
    duel(tmp_path, *other, 0.04, "faster", name="duel-case")
    duel(tmp_path, sweeps.job("cudnn", 100.0, None, options={"splits": 2}), flash, 0.04, "faster", name="duel-options")
    assert not decided(compare(folder))
    duel(tmp_path, cudnn, flash, 0.04, "faster", name="duel-z", at=1)
    duel(tmp_path, flash, cudnn, 0.04, "faster", name="duel-a", at=2)
    assert best(compare(folder)) == ["flash"]
    duel(tmp_path, flash, cudnn, 0.0, "undecided", name="duel-0", at=3)
    assert best(compare(folder)) == ["cudnn", "flash"]


@pytest.mark.parametrize(
    "text", ["", '{"forward": [{"a": "a=x"}]}', "\udcff",
             '{"forward": [{"a": "a", "b": "b", "effect": -2, "low": -3, "high": 1, "verdict": "faster"}]}',
             '{"forward": [{"a": "", "b": "?", "effect": 1, "low": 0.5, "high": 2, "verdict": "faster"}]}'],
)  # fmt: skip
def test_a_file_without_a_verdict_decides_nothing(tmp_path, text):
    cudnn, flash, math = tied()
    folder = sweeps.write(tmp_path / "s", (cudnn, flash, math))
    found = duel(tmp_path, cudnn, flash, 0.04, "faster")
    assert len(decided(compare(folder))) == 2
    (found / VERDICTS_NAME).write_bytes(text.encode(errors="surrogateescape"))
    assert not decided(compare(folder)) and len(compare(folder).ties) == 1


def test_a_duel_that_is_a_link_out_of_the_folder_is_not_read(tmp_path):
    cudnn, flash, math = tied()
    folder = sweeps.write(tmp_path / "home" / "s", (cudnn, flash, math))
    elsewhere = duel(tmp_path / "elsewhere", cudnn, flash, 0.04, "faster")
    (tmp_path / "home" / "duel-1").symlink_to(elsewhere)
    assert not decided(compare(folder))
