"""bench/hard_values.py: what is done before a kill or the end of the budget is kept, and the same command goes on."""

import csv
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import hard_values
from apart import Apart, Ended
from hard_journal import Journal
from hard_worker import Said, Task

from attn_exp.core.catalogue import backends

KINDS = ["normal", "negative", "mixed"]


def one_case(monkeypatch, masks=({"causal": True},), length=70):
    monkeypatch.setattr(hard_values, "MASKS", masks)
    monkeypatch.setattr(hard_values, "DTYPES", ("bfloat16", "float16"))
    monkeypatch.setattr(hard_values, "LENGTHS", {"cpu": (length,)})
    monkeypatch.setattr(hard_values, "list_gpus", list)


def read_csv(folder):
    with (folder / "hard_values.csv").open() as file:
        return list(csv.DictReader(file))


def command(folder, *words):
    return hard_values.main([str(folder), "--processes", "1", "--kinds", ",".join(KINDS), *words])


def test_all_backends_and_kinds_are_checked_and_the_journal_is_gone(tmp_path, monkeypatch, capsys):
    one_case(monkeypatch)
    assert command(tmp_path, "--seed", "1", "math", "eager", "cudnn") == 0
    rows = read_csv(tmp_path)
    assert {(row["backend"], row["kind"], row["index"]) for row in rows} == {
        (backend, kind, index) for backend in ("math", "eager") for kind in KINDS for index in "01"
    }
    assert {row["tensor"] for row in rows} == {"out", "dq", "dk", "dv"}
    assert {row["status"] for row in rows} == {"ok"}
    assert "Nothing is wrong." in (tmp_path / "hard_values.md").read_text()
    assert not (tmp_path / "hard_values.jsonl").exists()
    assert "left out" not in capsys.readouterr().out.lower()


def test_the_rows_are_those_of_a_fresh_preparation(tmp_path, monkeypatch):
    from accuracy import compared, computed

    from attn_exp.attention.expected import expected
    from attn_exp.attention.hard_values import make_inputs_of
    from attn_exp.backends.base import load_backend
    from attn_exp.core.conf import conf_folder, read_yaml

    one_case(monkeypatch)
    assert command(tmp_path, "--seed", "5", "math") == 0
    case = hard_values.cases("cpu")[0]
    inputs = make_inputs_of("mixed", case, "cpu", 5, with_gradients=True)
    wanted = expected(case, inputs, with_gradients=True)
    calls = load_backend(read_yaml(conf_folder() / "backend" / "math.yaml")).prepare(case, inputs)
    alone = compared(case, inputs, wanted, computed(calls, "cpu", 1, with_gradients=True), calls)
    kept = [row for row in read_csv(tmp_path) if row["kind"] == "mixed" and row["index"] == "0"]
    assert [row["error"] for row in kept] == [f"{row['error']:.4g}" for row in alone]


def test_without_time_everything_is_left_out_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    one_case(monkeypatch)
    assert command(tmp_path, "--seed", "1", "--budget-s", "0", "math", "eager") == 3
    assert "math 6 of 6 pairs" in (tmp_path / "hard_values.md").read_text()
    assert "eager 6 of 6 pairs" in capsys.readouterr().out
    # As a kill leaves it: some pairs, and a part of a line.
    journal = Journal(tmp_path / "hard_values.jsonl", json.loads((tmp_path / "hard_values.jsonl").read_text()))
    journal.add((0, 1, "math", "normal"), [{"status": "inaccurate", "tensor": "out", "reason": "kept from before"}])
    with journal.path.open("a") as file:
        file.write('{"index": 0, "seed": 1, "backe')
    assert command(tmp_path, "math", "eager") == 1
    rows = read_csv(tmp_path)
    assert [row["reason"] for row in rows if row["status"] != "ok"] == ["kept from before"]
    assert len({(row["backend"], row["kind"], row["index"]) for row in rows}) == 12


def test_a_journal_of_other_settings_is_refused(tmp_path, monkeypatch):
    one_case(monkeypatch)
    command(tmp_path, "--seed", "1", "--budget-s", "0", "math")
    with pytest.raises(SystemExit, match="give another folder"):
        command(tmp_path, "--seed", "2", "math")


def test_a_process_that_dies_or_hangs_costs_what_it_was_at(tmp_path, monkeypatch):
    def check(task):
        for config, kinds in task.todo:
            for kind in kinds:
                yield Said(config["name"], kind)
                if (config["name"], kind) == ("dies", "b"):
                    os.kill(os.getpid(), signal.SIGSEGV)
                if (config["name"], kind) == ("hangs", "b"):
                    time.sleep(60)
                yield Said(config["name"], kind, ({"status": "ok", "tensor": "out", "reason": kind},))
                if (config["name"], kind) == ("breaks", "b"):
                    raise RuntimeError("the GPU is in an error")

    monkeypatch.setattr(hard_values, "check", check)
    monkeypatch.setattr(hard_values, "_SILENCE_S", 1.0)
    case = hard_values.cases("cpu")[0]
    todo = tuple(({"name": name}, ("a", "b", "c")) for name in ("right", "dies", "hangs", "breaks", "after"))
    tasks = [Task(0, case, 1, todo, "cpu")]
    journal = Journal(tmp_path / "journal", {"seed": 1})
    hard_values.run(tasks, journal, 2, time.monotonic() + 60, lambda: None)
    said = {key[2:]: rows[0]["status"] for key, rows in journal.done.items()}
    assert {key for key, status in said.items() if status == "error"} == {("dies", "b"), ("hangs", "b")}
    assert len(said) == 15
    reasons = {key[2]: rows[0]["reason"] for key, rows in journal.done.items() if rows[0]["status"] == "error"}
    assert reasons == {
        "dies": "the process was killed by SIGSEGV", "hangs": "the process had not returned after 1 s"
    }  # fmt: skip


def test_a_process_that_dies_before_its_first_word_is_not_asked_for_ever():
    def work(task):
        os._exit(7)
        yield

    assert list(Apart(work, 1, 5.0).run(deque("ab"), time.monotonic() + 20)) == [
        ("a", Ended("exited with code 7")), ("b", Ended("exited with code 7"))
    ]  # fmt: skip


def test_what_is_under_way_when_the_time_is_over_is_ended(tmp_path):
    def work(task):
        (tmp_path / "pid").write_text(str(os.getpid()))
        yield "begun"
        time.sleep(60)

    began = time.monotonic()
    assert [said for _, said in Apart(work, 1, 50.0).run(deque("a"), began + 1.0)] == ["begun"]
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_bf16_comes_first_and_the_usual_backends_before_others():
    for device in ("cpu", "cuda"):
        chosen = hard_values.cases(device)
        count = len(hard_values.LENGTHS[device])
        assert len(set(chosen)) == len(chosen) == 4 * len(hard_values.MASKS) * count
        first = chosen[: 4 * count]
        assert [case.dtype for case in first] == ["bfloat16"] * 2 * count + ["float16"] * 2 * count
        assert not any(case.softcap or case.window or case.lengths for case in first)
        configs = [{"name": name} for name in ("cudnn", "flex", "math")]
        tasks = hard_values.tasks_of(configs, KINDS, [1, 2], chosen, device)
        turns = [(task.case.dtype, [config["name"] for config, _ in task.todo]) for task in tasks]
        half = 2 * 2 * count
        assert turns[:half] == [("bfloat16", ["cudnn", "math"])] * half
        assert turns[half : 2 * half] == [("bfloat16", ["flex"])] * half
        assert {dtype for dtype, _ in turns[2 * half : 4 * half]} == {"float16"}
        rest = [names for _, names in turns[4 * half :]]
        assert rest == sorted(rest, key=lambda names: names == ["flex"])
        assert len(turns) == 2 * 2 * len(chosen)
    assert set(hard_values.FIRST) | set(hard_values.COMPILED) <= set(backends())
