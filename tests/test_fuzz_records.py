"""Mutated records among good ones, through compare, explain and the API, beside numbers computed apart.

Nothing may end in a traceback or in exit 1, the code of a regression; a good record counts as before; and of what is
shown, ratios and order are those of the times in the files. `make fuzz` tries ten thousand.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sweeps
from hypothesis import given
from hypothesis import strategies as st
from mutations import attempt, contents, mutated
from rich_records import rich

from attn_exp import compare, load
from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.explain import main as explain_main
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.errors import RecordError, UserError
from attn_exp.core.record.file import FILE_NAME, read_record
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder
from attn_exp.results.table import csv_text, job_line, table
from attn_exp.tracking.base import metrics, params, tags

RECORDS = [
    rich(sweeps.job("flash", 100.0, 250.0)),
    rich(sweeps.job("cudnn", 101.0, 240.0)),
    rich(sweeps.job("math", 300.0, 900.0, options={"block": 64})),
    sweeps.failed(backend="efficient"),
]
CONTENTS = [msgspec.json.encode(record) for record in RECORDS]
# How `compare` is asked besides plainly.
MORE = [
    [], ["against=old"], ["against=old", "fail_if_slower=3%"], ["against=old", "anyway=true"],
    ["older", "old", "history=true"], ["by=dtype"],
    ["by=gpu_uuid,power_limit_w"], ["by=backend.block"], ["sort=gpu_uuid"], ["sort=-backend.block"],
    ["sort=lengths"], ["metric=joules"], ["metric=error_out"], ["baseline=flash"],
    ["where=power_limit_w > 1 or gpu_uuid != none"], ["where=gpu_uuid == 'GPU-1'"], ["where=lengths == none"],
]  # fmt: skip
FORMS = ["table", "markdown", "csv", "json"]


def earlier(records: list[Record], days: float) -> list[Record]:
    return [replace(one, finished_at=one.finished_at - 86400 * days) for one in records]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with three sweeps of the good records; the commands are run in it."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, days in (("first", 0), ("old", 1), ("older", 2)):
            sweeps.write(folder / "multirun" / name, earlier(RECORDS, days))
        yield folder


def times_of(content: bytes, direction: str) -> float | None:
    """Return what a record's file says of a pass, read with another library; None if it is not ok.

    None also where fields that the readers skip are no JSON, which the whole record's reader refuses.
    """
    try:
        tree = json.loads(content.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return float(tree["metrics"][f"{direction}/time_us"]) if tree["status"] == "ok" else None


def check_against_files(rivals: Rivals, files: dict[str, bytes]) -> None:
    """Check each gain and the order of the rows against the times in the files."""
    for _, group in itertools.groupby(rivals.rows, key=lambda row: row.group):
        rows = list(group)
        times = [times_of(files[row.cell.result.path.parent.name], row.cell.direction) for row in rows]
        for row, time in zip(rows, times, strict=True):
            assert row.cell.value == time or time is None
            assert row.gain is None or row.gain.low <= row.gain.value <= row.gain.high
        known = [
            (row, time) for row, time in zip(rows, times, strict=True) if row.gain is not None and time is not None
        ]
        for (one, one_us), (other, other_us) in itertools.combinations(known, 2):
            # The best is the same for both, so the ratio of their gains is that of their times.
            assert one.gain is not None and other.gain is not None
            assert math.isclose(one.gain.value * one_us, other.gain.value * other_us, rel_tol=1e-9)
            assert (one.gain.value > other.gain.value) == (one_us < other_us) or math.isclose(one_us, other_us)


@mutated(40)
@given(st.integers(0, len(RECORDS) - 1), st.sampled_from(MORE), st.sampled_from(FORMS), st.data())
def test_a_mutated_record_stops_no_reader_and_changes_no_other(
    world: Path, capsys_once: Any, which: int, more: list[str], form: str, data: st.DataObject
) -> None:
    content = data.draw(contents(json.loads(CONTENTS[which]), CONTENTS[which]))
    folder = world / "multirun" / "first"
    job = folder / RECORDS[which].request.job
    good = (job / FILE_NAME).read_bytes()
    (job / FILE_NAME).write_bytes(content)
    try:
        sweep = read_folder(folder)
        assert len(sweep.results) + len(sweep.broken) == len(RECORDS)
        assert all(FILE_NAME in sentence and "\n" not in sentence and len(sentence) < 700 for sentence in sweep.broken)
        # Exit 1 is a regression: only a record that is read may be slower, or lost.
        code = compare_main(["first", *more, f"format={form}"])
        assert code in ((0, 1, 2, 3) if "fail_if_slower=3%" in more else (0, 2, 3)), code
        assert code in (2, 3) or not sweep.broken
        assert explain_main(["first"]) == 0
        assert explain_main([f"first/{job.name}"]) in (0, 2)
        capsys_once()
        loaded = load("first")
        assert repr(loaded) and len(loaded.to_frame()) >= 0
        files = {path.parent.name: path.read_bytes() for path in folder.glob(f"*/{FILE_NAME}")}
        rivals, refusal = attempt(lambda: compare(loaded), UserError)
        if rivals is not None:
            assert len(rivals.to_frame()) == len(rivals.rows)
            check_against_files(rivals, files)
        assert refusal is None or len(refusal) < 1000
        assert table(sweep.results) and csv_text(sweep.results) and all(map(job_line, sweep.results))
        record, why = attempt(lambda: read_record(job), RecordError)
        # Whoever reads the whole file refuses what the others refuse.
        assert record is None or not sweep.broken
        if record is not None:
            assert all(isinstance(value, str) for value in (params(record.request) | tags(record)).values())
            assert all(math.isfinite(value) and len(name) <= 250 for name, value in metrics(record).items())
            assert record.request.case.brief()
        else:
            assert why is not None and FILE_NAME in why and len(why) < 700
    finally:
        (job / FILE_NAME).write_bytes(good)


@pytest.fixture
def capsys_once(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that checks what was printed since it was last called."""

    def check() -> None:
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        # Other characters than line feed and tab that a terminal obeys.
        assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in out + err)

    return check


@mutated(40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["flash", "cudnn", "math", "flex"]), st.floats(1e-3, 1e9), st.floats(1e-4, 0.5)),
        min_size=2, max_size=4, unique_by=lambda one: one[0],
    )
)  # fmt: skip
def test_ratios_and_order_are_those_of_the_times_whatever_these_are(
    tmp_path_factory: pytest.TempPathFactory, measured: list[tuple[str, float, float]]
) -> None:
    folder = tmp_path_factory.mktemp("s")
    records = [sweeps.job(name, us, us * 2.5, half=half) for name, us, half in measured]
    rivals = compare(sweeps.sweep(folder, records))
    check_against_files(rivals, {path.parent.name: path.read_bytes() for path in folder.glob(f"*/{FILE_NAME}")})
    assert len(rivals.rows) == 2 * len(records)
    fastest = min(measured, key=lambda one: one[1])
    sure = [one for one in measured if one[0] != fastest[0] and one[1] < fastest[1] * 1.001]
    best = {row.cell.result.label for row in rivals.rows if row.best and row.cell.direction == "forward"}
    # A wide interval puts a row in doubt; without one the fastest is always among the best.
    assert fastest[0] in best or sure or max(half for _, _, half in measured) > 0.02
