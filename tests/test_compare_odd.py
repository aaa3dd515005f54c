"""Odd records, odd words, many look-alikes: named and skipped, refused in a sentence, or shown; never a traceback."""

import json

import pytest
import sweeps
from hypothesis import given
from hypothesis import strategies as st

from attn_exp import compare
from attn_exp.commands.compare import main
from attn_exp.core.errors import UserError
from attn_exp.core.record_file import FILE_NAME
from attn_exp.core.request import Compile
from attn_exp.core.text import printable
from attn_exp.plots.style import looks


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A sweep of two records, and what changes one of them."""
    monkeypatch.chdir(tmp_path)
    folder = sweeps.write(tmp_path / "multirun" / "s", [sweeps.job("flash"), sweeps.job("cudnn", 80.0)])

    def spoil(change):
        (path,) = folder.glob(f"flash-*/{FILE_NAME}")
        tree = json.loads(path.read_bytes())
        change(tree)
        path.write_text(json.dumps(tree))

    return spoil


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(environment=None),
        lambda tree: tree.update(environment=[1]),
        lambda tree: tree["environment"].update(versions=None),
        lambda tree: tree["request"].update(backend="flash"),
        lambda tree: tree.update(canaries={"matmul": "x"}),
        lambda tree: tree.update(canaries=None),
        lambda tree: tree.update(ceilings=None),
        lambda tree: tree["metrics"].update({"forward/time_us": -1.0}),
        lambda tree: tree["metrics"].update({"backward/time_us": 0.0}),
    ],
)
def test_a_record_of_another_shape_is_named_and_skipped(two, change, capsys):
    two(change)
    assert main(["s"]) == 3
    said = capsys.readouterr()
    assert "cudnn" in said.out
    assert said.err.startswith("skipped: ")
    assert "is not a record" in said.err


def test_a_record_nested_without_end_is_named_and_skipped(two, tmp_path, capsys):
    (path,) = (tmp_path / "multirun" / "s").glob(f"flash-*/{FILE_NAME}")
    text = path.read_text()
    path.write_text(text.replace('"environment": {', '"environment": {"x": ' + "[" * 100_000 + "]" * 100_000 + ",", 1))
    assert main(["s"]) == 3
    assert "skipped: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["where=model < seq_len", "sort=backend.block", "by=backend.order", "where=backend.block >= 32"]
)
def test_unlike_values_are_compared_grouped_and_sorted_without_a_traceback(tmp_path, monkeypatch, capsys, word):
    own = [{"block": 64, "order": ["flash", "math"]}, {"block": "auto", "order": ["math"]}, {}]
    sweeps.write(
        tmp_path / "multirun" / "s", [sweeps.job("priority", 100.0 + n, options=one) for n, one in enumerate(own)]
    )
    monkeypatch.chdir(tmp_path)
    assert main(["s", word]) in (0, 2)
    said = capsys.readouterr()
    assert said.out or len(said.err.splitlines()) == 1


def test_thirteen_option_sets_of_one_backend_have_looks(tmp_path):
    records = [sweeps.job("triton", 100.0 + n, options={"num_warps": n}) for n in range(30)]
    sweeps.write(tmp_path / "multirun" / "s", records)
    results = [row.cell.result for row in compare("s", folder=str(tmp_path / "multirun")).rows]
    found = looks(results)
    assert len(found) == 30
    assert len(set(found.values())) >= 12


def test_two_ways_of_compiling_one_backend_have_a_row_each(tmp_path):
    records = [
        sweeps.job("math", 100.0, None, compile=Compile(mode="default")),
        sweeps.job("math", 50.0, None, compile=Compile(mode="default", options={"max_autotune": True})),
    ]
    sweeps.write(tmp_path / "multirun" / "s", records)
    found = compare("s", folder=str(tmp_path / "multirun"))
    assert len({row.cell.result.label for row in found.rows}) == 2
    assert len(found.means) == 2


def test_what_failed_everywhere_is_said_in_a_sentence(tmp_path):
    for name in ("a", "b", "c"):
        sweeps.write(tmp_path / "multirun" / name, [sweeps.failed()])
    at = {"folder": str(tmp_path / "multirun")}
    with pytest.raises(UserError, match="no record is ok"):
        compare("a", **at)
    for name in ("a", "b", "c"):
        sweeps.write(tmp_path / "multirun" / name, [sweeps.job("math")])
    with pytest.raises(UserError, match="a time_us above zero"):
        compare(["a", "b", "c"], history=True, where="backend == flash", **at)


HOSTILE = "bad\n\\input{/etc/passwd}\n# Heading <img src=x onerror=1>\x1b[31m"


@pytest.mark.parametrize("form", ["table", "markdown", "latex", "html"])
def test_a_reason_stays_a_sentence_in_every_format(tmp_path, monkeypatch, capsys, form):
    monkeypatch.chdir(tmp_path)
    sweeps.write(tmp_path / "multirun" / "s", [sweeps.job("math"), sweeps.failed(reason=HOSTILE)])
    assert main(["s", f"format={form}"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert not any(line.startswith(("\\input", "# Heading")) for line in out.splitlines())
    assert "<img" not in out or form in ("table", "latex")


@given(st.text())
def test_printable_text_is_one_line_without_control_characters(text):
    assert printable(text).isprintable()
    assert "\n" not in printable(text)
