"""Records that are somebody else's, damaged, or of a changed program: each is read, or skipped with its reason."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sweeps

from attn_exp.cli import dispatch
from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.explain import main as explain_main
from attn_exp.commands.log import main as log_main
from attn_exp.commands.run import main as run_main
from attn_exp.compare.published import read_figures
from attn_exp.config.check import is_of_composing
from attn_exp.core.errors import RecordError, UserError, brief
from attn_exp.core.record import Disagreement, PassRecord
from attn_exp.core.record_file import FILE_NAME, decode_record
from attn_exp.core.request import Request
from attn_exp.results.result import decode

Tree = dict[str, Any]
Change = Callable[[Tree], object]
PATH = Path("multirun/s/job") / FILE_NAME
DIGITS = "9" * 5000


def put(*place: str | int, value: Any) -> Change:
    """Return a change that puts a value into a record's tree."""

    def change(tree: Tree) -> None:
        owner: Any = tree
        for key in place[:-1]:
            owner = owner[key]
        owner[place[-1]] = value

    return change


def metric(name: str, value: Any) -> Change:
    return put("metrics", name, value=value)


def environment(name: str, value: Any) -> Change:
    return put("environment", name, value=value)


# Change, and what the reason says.
STRANGE: dict[str, tuple[Change, str]] = {
    "time of 1e18": (metric("forward/time_us", 1e18), "metrics.forward/time_us=1e+18 is no possible value"),
    "time of 5e-324": (metric("forward/time_us", 5e-324), "metrics.forward/time_us=4.94066e-324"),
    "time below zero": (metric("backward/time_us", -1.0), "it is ok without a time of backward"),
    "an error of the power below -1": (metric("forward/power_error", -3.0), "metrics.forward/power_error=-3"),
    "rounds without end": (metric("forward/rounds", 1e60), "metrics.forward/rounds=1e+60"),
    "no time": (lambda tree: tree["metrics"].pop("backward/time_us"), "it is ok without a time of backward"),
    "rate of 1e300": (metric("forward/tflops", 1e300), "metrics.forward/tflops=1e+300"),
    "median above its interval": (metric("forward/time_high_us", 99.0), "forward/time_us=100 is outside of its own"),
    "median below its interval": (metric("forward/time_low_us", 101.0), "forward/time_us=100 is outside of its own"),
    "a metric's name of two lines": (metric("forward/a\nb", 1.0), "a name in metrics has a line break"),
    "a metric's name of 300 characters": (metric("x" * 300, 1.0), "a name in metrics has 300 characters"),
    "3,000 metrics": (lambda tree: tree["metrics"].update({f"x{n}": 1.0 for n in range(3000)}), "metrics has 3,0"),
    **{
        f"{name} is {value!r}": (environment(name, value), f"$.{name}")
        for name in ("gpu_uuid", "power_limit_w", "cudnn", "git_commit", "cuda", "driver", "host", "gpu", "cpu")
        for value in ({"a": 1}, [1], True)
    },
    "versions are a list": (environment("versions", ["2.11"]), "$.versions"),
    "versions are null": (environment("versions", None), "$.versions"),
    "a version is a number": (environment("versions", {"torch": 2}), "$.versions[...]"),
    "a power limit of 1e300": (environment("power_limit_w", 1e300), "$.power_limit_w"),
    "processors by the billion": (environment("cpu_affinity", "0-99999999999"), "$.cpu_affinity"),
    "processors of letters": (environment("numa_nodes", "a-b"), "$.numa_nodes"),
    "a GPU's name of 5,000 digits": (environment("gpu", DIGITS), "$.gpu"),
    "a pass in the request": (put("request", "measuring", "passes", value=["sideways"]), "it has a pass 'sideways'"),
    "a pass that was measured": (put("passes", "sideways", value={}), "it has a pass 'sideways'"),
    "one pass twice": (put("request", "measuring", "passes", value=["forward"] * 2), "none, or one twice"),
    "no pass": (put("request", "measuring", "passes", value=[]), "none, or one twice"),
    "a workload of two lines": (put("request", "case", "workload", value="dit\nblock"), "workload=dit block does not"),
    "a model of two lines": (put("request", "model", value="a\nb"), "model.name has a line break"),
    "a model of 300 characters": (put("request", "model", value="x" * 300), "model.name has 300 characters"),
    "a timer of two lines": (put("request", "measuring", "timer", value="a\nb"), "timer.name has a line break"),
    "a flag of two lines": (put("flags", value=["a\nb"]), "flags[0] has a line break"),
    "a backend of two lines": (put("request", "backend", "name", value="a\nb"), "backend.name has a line break"),
    "a backend of 300 characters": (put("request", "backend", "name", value="x" * 300), "has 300 characters"),
    "a backend that is a number": (put("request", "backend", "name", value=5), "its backend has no name"),
    "a job that is a path": (put("request", "job", value="../x"), "job=../x cannot name"),
    "3,000 options": (
        lambda tree: tree["request"]["backend"].update({f"x{n}": n for n in range(3000)}), "has 3,002 options"
    ),
    "it ended in the year 30,000,000": (put("finished_at", value=1e15), "finished_at=1e+15 is no possible value"),
    "it ended before 1970": (put("finished_at", value=-1e9), "finished_at=-1e+09 is no possible value"),
    "it began before 1970": (put("started_at", value=-1.0), "started_at=-1 is no possible value"),
    "a timer's median of zero": (put("passes", "forward", "disagreements", 0, "one_us", value=0.0), "about no time"),
    "a canary of 1e200": (put("canaries", value={"copy": 1e200}), "canaries.copy=1e+200"),
    "endless lists": (put("environment", "host", value=json.loads("[" * 900 + "]" * 900)), "is not a record"),
}  # fmt: skip


def tree_of() -> Tree:
    record = sweeps.job("flash", 100.0)
    other = Disagreement(one="device", other="kernel", one_us=1.0, other_us=2.0, low=0.1, high=0.2)
    measured: PassRecord = replace(record.passes["forward"], disagreements=(other,))
    tree: Tree = msgspec.to_builtins(replace(record, passes=record.passes | {"forward": measured}))
    return tree


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_record_has_one_reason_for_both_of_its_readers(kind: str) -> None:
    change, reason = STRANGE[kind]
    tree = copy.deepcopy(tree_of())
    for reader in (decode, decode_record):
        assert reader(json.dumps(tree).encode(), PATH) is not None
    change(tree)
    for reader in (decode, decode_record):
        with pytest.raises(RecordError) as raised:
            reader(json.dumps(tree).encode(), PATH)
        said = str(raised.value)
        assert said.startswith(f"{PATH} is not a record: ")
        assert reason in said
        assert "\n" not in said and len(said) < 500


@pytest.mark.parametrize(
    "change",
    [
        put("passes", "forward", "timings", 0, "times_us", value=[1e18]),
        put("passes", "forward", "timings", 0, "times_us", value=[-1.0]),
        put("passes", "forward", "timings", 0, "times_us", value=[5e-324]),
        put("passes", "forward", "timings", 0, "times_us", value=[1.0, 2.0]),
        put("passes", "forward", "kernels", 0, "time_us", value=1e300),
        put("passes", "forward", "kernels", 0, "name", value="9" * 50_000),
        put("passes", "forward", "rest_s", value=1e300),
        put("notes", value={"x": -1e300}),
        put("stages_s", value={"a\nb": 1.0}),
        put("profiles", value={"torch": {"status": "ok", "metrics": {"x": 1e301}}}),
        put("telemetry", value=[{"sm_mhz": {"x": [1e301]}}]),
    ],
)
def test_what_only_the_whole_record_has_is_looked_at_there(change: Change) -> None:
    tree = tree_of()
    change(tree)
    with pytest.raises(RecordError):
        decode_record(json.dumps(tree).encode(), PATH)


def test_strange_records_are_skipped_and_the_others_compared_explained_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 3 and not 1, which a continuous integration reads as a regression."""
    monkeypatch.chdir(tmp_path)
    folder = sweeps.write(tmp_path / "multirun" / "first", [sweeps.job(), sweeps.job("math", 200.0)])
    sweeps.write(tmp_path / "multirun" / "old", [sweeps.job(), sweeps.job("math", 200.0)])
    for number, (change, _) in enumerate(STRANGE.values()):
        tree = tree_of()
        change(tree)
        (folder / f"strange-{number}").mkdir()
        (folder / f"strange-{number}" / FILE_NAME).write_text(json.dumps(tree))
    for command, words, code in (
        (compare_main, ["first"], 3),
        (compare_main, ["first", "against=old", "fail_if_slower=3%"], 3),
        (compare_main, ["first", "format=json"], 3),
        (explain_main, ["first"], 0),
        (log_main, ["first", "tracker.uri=sqlite:///m.db"], 3),
    ):
        assert command(words) == code
        out, err = capsys.readouterr()
        said = (out + err) if command is explain_main else err
        assert said.count("skipped: ") >= len(STRANGE), words
        assert "Traceback" not in out + err
        assert "flash" in out or "2 records, 2 new" in out


@pytest.mark.parametrize("value", ["a\nb", "x" * 300])
def test_a_request_that_no_reader_would_take_back_is_refused(value: str) -> None:
    request = sweeps.job().request
    for change in ({"model": value}, {"measuring": replace(request.measuring, timer=value)}):
        with pytest.raises(UserError, match=r"(model|timer)\.name has"):
            replace(request, **change)
    assert isinstance(request, Request)


def test_messages_repeat_endless_words_in_part() -> None:
    assert brief("a short one, /tmp/some/path") == "a short one, /tmp/some/path"
    assert len(brief(f"key={DIGITS} is wrong")) < 250
    assert brief(f"key={DIGITS} is wrong").startswith("key=999") and brief(f"key={DIGITS} is wrong").endswith(
        " is wrong"
    )
    assert len(str(UserError("many words " * 1000))) <= 1200
    assert str(RecordError("of\n two  lines")) == "of two lines"


def test_published_figures_may_begin_with_a_mark_and_are_a_file(tmp_path: Path) -> None:
    text = "tflops,seq_len,library\n300,1024,x\n"
    file = tmp_path / "figures.csv"
    for content in (text.encode(), text.encode("utf-8-sig")):
        file.write_bytes(content)
        figures, left_out = read_figures(file)
        assert ([one.tflops for one in figures], left_out) == ([300.0], [])
    for content in (text.encode("utf-16"), b"\xff" + text.encode(), b"\0" * 10, b"tflops,seq_len\n" + b"x" * 200_000):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"figures\.csv"):
            read_figures(file)
    with pytest.raises(UserError, match="/dev/zero cannot be read as CSV"):
        read_figures(Path("/dev/zero"))


@pytest.mark.parametrize("command", [compare_main, explain_main, log_main])
@pytest.mark.parametrize("word", ["x" * 300, DIGITS, f"rows={DIGITS}", f"where=seq_len == {DIGITS}", f"{'x' * 300}=1"])
def test_endless_words_are_refused_in_two_lines(
    command: Callable[[list[str]], int], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command([word]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err) < 200) == ("", True)
    assert "characters: names and numbers have at most 200" in err


@pytest.mark.parametrize(
    "word",
    ["profiler=[1]", "backend=${oc.select:x}", "backend=${oc.select:batch}", "++passes.a=false", "seed=" + DIGITS],
)
def test_overrides_over_which_hydra_stumbles_are_refused_in_a_sentence(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([word], ["-m", word, "batch=1,2"]):
        assert run_main([*words, "device=cpu", "dry_run=true"]) == 2
        out, err = capsys.readouterr()
        assert "would run" not in out
        assert "Traceback" not in err and len(err) < 300
        assert f"Hydra cannot compose {word}" in err or "names and numbers have at most" in err


def test_a_sweep_s_name_may_be_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(["sweep=2026", "device=cpu", "dry_run=true"]) == 0
    assert "would run" in capsys.readouterr().out


def test_an_error_of_a_job_is_none_of_composing() -> None:
    class Odd:
        def __index__(self) -> int:
            raise TypeError("of a job")

    with pytest.raises(TypeError) as raised:
        range(Odd())  # type: ignore[call-overload]
    assert not is_of_composing(raised.value)


@pytest.mark.parametrize("word", ["folder=null", "folder=", "folder=[a]", "folder={a:1}"])
def test_a_folder_that_is_none_is_refused(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main([word, "device=cpu", "dry_run=true"]) == 2
    assert "names no folder: leave it out, or name one" in capsys.readouterr().err
    assert run_main(["-m", "folder=3", "batch=1,2", "device=cpu", "dry_run=true"]) == 0


def test_an_endless_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["a" * 300]) == 2
    assert "has 300 characters" in capsys.readouterr().err
