import json
import random
import re
from dataclasses import replace

import pytest
from cli import QUICK, TRACKED, left_behind, on_terminal, run
from fakes import make_record, make_request, make_timing

from attn_exp.commands.duel import main, rivals_of
from attn_exp.core.errors import UserError
from attn_exp.core.record.record import PassRecord
from attn_exp.execution.duel import PROCESSES, compare_pairs, joined, report

CASE, STORED = (tuple(word for word in words if not word.startswith("stopping")) for words in (QUICK, TRACKED))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a=flash"], "two backends"),
        (["a=flash", "b.x=1"], "b has options"),
        (["a=flash", "b=math", "b=eager"], "b has two backends"),
        (["a=flash", "b=math", "backend=eager"], "backend=eager would be the backend of all rivals: .* c=eager"),
        (["a=flash", "b=flash", "a.compile=default", "compile=none"], "compile=none is for all rivals, and a.compile="),
        (["a=fa4", "b=fa4", "b.x=1", "++backend.x=2"], "is for all rivals, and b.x=1 for one"),
    ],
)
def test_words_that_make_no_duel_or_override_a_rival_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        rivals_of(given)


def rival(letter, medians):
    timing = make_timing(
        [median for median in medians for _ in range(3)], [i for i in range(len(medians)) for _ in range(3)]
    )
    request = make_request()
    labelled = type(request)(
        **{name: getattr(request, name) for name in request.__dataclass_fields__} | {"label": letter}
    )
    metrics = {"forward/time_us": medians[0], "forward/tflops": 1.0, "forward/time_half_width": 0.001}
    return make_record(request=labelled, passes={"forward": PassRecord(timings=(timing,))}, metrics=metrics)


def test_rounds_are_paired_and_the_verdict_names_who_is_faster():
    drift = [1.0, 1.1, 1.2, 1.3, 1.2, 1.1, 1.0]
    records = [
        rival("a=x", [100.0 * d for d in drift]),
        rival("b=y", [103.0 * d * (1 + i / 1e4) for i, d in enumerate(drift)]),
    ]
    found = {"forward": compare_pairs(records, "forward", 0.01)}
    assert found["forward"][0].verdict == "faster"
    assert found["forward"][0].effect == pytest.approx(0.03, abs=0.001)
    text = report(records, found)
    assert "a=x is faster than b=y: b=y takes 3.03 % more time" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_interval_contains_the_effect_of_memory_addresses():
    def wrong(processes, noise):
        chance, differ, outside = random.Random(1), 0, 0
        for _ in range(200):
            parts = []
            for _ in range(processes):
                biases = [chance.gauss(0, 0.008) for _ in "ab"]
                parts.append([rival(name, [100 * (1 + bias + chance.gauss(0, noise)) for _ in range(40 // processes)])
                              for name, bias in zip("ab", biases, strict=True)])  # fmt: skip
            (found,) = compare_pairs([joined(one) for one in zip(*parts, strict=True)], "forward", 0.01)
            differ += found.verdict in ("faster", "slower")
            outside += not found.low <= 0 <= found.high
        return differ, outside

    for noise in (0.001, 0.005):
        assert wrong(1, noise)[0] > 60
        differ, outside = wrong(PROCESSES, noise)
        assert differ <= 20 and outside <= 30, (noise, differ, outside)


def test_a_pair_that_is_not_told_apart_is_given_no_direction():
    uneven = [(101.0, 100.0), (99.0, 100.2), (100.0, 99.8), (103.0, 100.0), (97.0, 100.1), (100.0, 100.0)]
    records = [rival("a=x", [one for one, _ in uneven]), rival("b=y", [other for _, other in uneven])]
    found = {"forward": compare_pairs(records, "forward", 0.01)}
    text = report(records, found)
    assert "a=x and b=y are undecided: b=y takes a=x's time " in text
    assert "more time" not in text and "less time" not in text


def test_with_company_on_the_machine_only_large_differences_are_told():
    def verdict(ratio, *flags):
        steady = [100.0, 100.1, 99.9, 100.0, 100.1, 99.9, 100.0]
        records = [
            replace(rival("a=x", steady), flags=flags),
            rival("b=y", [ratio * time * (1 + i / 1e5) for i, time in enumerate(steady)]),
        ]
        found = {"forward": compare_pairs(records, "forward", 0.01)}
        return found["forward"][0].verdict, report(records, found)

    assert verdict(1.04)[0] == "faster"
    assert verdict(1.0)[0] == "equivalent"
    for flag in ("busy_host", "shared_gpu"):
        said, text = verdict(1.04, flag)
        assert said == "undecided"
        assert f"{flag}: " in text and "only intervals beyond the margin count" in text
        assert "rounds, margin -20.0 to +25.0 %" in text
        assert max(map(len, text.splitlines())) <= 120
        assert verdict(1.0, flag)[0] == "undecided"
        assert verdict(1.5, flag)[0] == "faster" and verdict(1 / 1.5, flag)[0] == "slower"


def test_rivals_are_compared_in_one_run_and_those_that_cannot_run_are_named(tmp_path):
    slow = ("c=eager", "c._target_=crashers:Slow", "c.name=slow")
    dies = ("d=eager", "d._target_=crashers:DiesLater", "d.name=frail")
    done = run("duel", "a=eager", "b=cudnn", *slow, *dies, *STORED, "stopping.budget_s=1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unsupported  b=cudnn: cudnn runs only on NVIDIA GPUs" in done.stdout
    assert re.search(r"error +d=frail: forward, round \d+: RuntimeError: worn out", done.stdout), done.stdout
    folder = next(tmp_path.glob("multirun/duel-*"))
    (pair,) = json.loads((folder / "duel.json").read_text())["forward"]
    assert (pair["a"], pair["b"], pair["verdict"]) == ("a=eager", "c=slow", "faster")
    assert len(list(folder.glob("*/record.json"))) == 4
    assert (folder / "ratios.png").stat().st_size > 5_000
    assert not (tmp_path / "mlruns").exists()
    assert left_behind(tmp_path) == []


def test_on_a_terminal_a_duel_says_what_it_does_to_its_end_and_breaks_no_line_within_a_number(tmp_path):
    words = ("duel", "a=eager", "b=eager", *CASE, "stopping.budget_s=0.2", "tracker=none")
    shown = on_terminal(*words, cwd=tmp_path, columns=70)
    assert "measuring a=eager and b=eager side by side" in shown
    assert "drawing the plot" in shown
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.replace("\r\n", "\n"))
    assert re.search(r"side by side  \w+  \d+ s", plain)
    lines = [line.rpartition("\r")[2] for line in plain.split("\n")]
    # What is one word is broken nowhere.
    assert [line for line in lines if len(line) > 70 and " " in line.strip()] == []
    (begin,) = [at for at, line in enumerate(lines) if line.startswith("forward   a=eager")]
    # On a busy machine the interval may have no bounds worth a number: [-99.98, >+99999].
    assert re.search(r" \[[-+.<>\d]+, [-+.<>\d]+\], \d+ rounds,? margin", " ".join(" ".join(lines[begin:]).split()))
    # No column without a value: a CPU has no SM clock.
    assert "TFLOPS" in shown and "SM MHz" not in shown


def test_one_rival_that_can_run_has_none_to_be_compared_with(tmp_path):
    alone = run("duel", "a=eager", "b=cudnn", *CASE, cwd=tmp_path)
    assert alone.returncode == 1
    assert "nothing to compare" in alone.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a=flsh", "b=math"), "did you mean 'flash'"),
        (("a=flash", "b=math", "bach=2"), "did you mean 'batch'"),
        (("a=flash", "b=math", "device=cuda:9"), "device=cuda:9"),
        (("a=flash",), "two backends"),
        (("a=flash", "b=math", "regime=brst"), "burst, sustained"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert (out, len(err.splitlines())) == ("", 1)
    assert list(tmp_path.iterdir()) == []
