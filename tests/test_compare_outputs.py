"""What is printed and written: held against golden files, the same numbers in all formats, within 120 columns.

`python tests/test_compare_outputs.py` writes the golden files anew, after a look at what changed.
"""

import csv
import io
import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import explained
import pytest
import sweeps

from attn_exp import compare
from attn_exp.comparison.pages import page
from attn_exp.core.sheet import FORMATS
from attn_exp.core.sheet.render import text_of
from attn_exp.core.sheet.sheet import rounded, written

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = (512, 1024, 8192)


def records(shift=1.0, seed=0, driver="580.1", session=1.0, day=0):
    """Three backends on six cases, with flags, a failure, and numbers of every size."""
    environment = sweeps.H200 | {"driver": driver}
    found = []
    for length in LENGTHS:
        for causal in (True, False):
            of = sweeps.case(seq_len=length, causal=causal, batch=1)
            us = 8.7654 * (length / 512) ** 2 * (0.6 if causal else 1.0)
            for index, (backend, factor) in enumerate((("flash", 1.0), ("cudnn", 0.62 if length > 512 else 1.004))):
                # A wobble that is the same every time, and a change in one backend's longest case.
                wobble = 1 + 0.002 * ((length // 512 + index + seed) % 3 - 1)
                own = us * factor * wobble * session * (shift if backend == "cudnn" and length == 8192 else 1.0)
                flags = ("power_capped",) if length == 8192 else ("launch_bound", "too_short") if us < 10 else ()
                found.append(
                    sweeps.job(backend, own, own * 2.71, of=of, half=0.004, flags=flags, environment=environment)
                )
            reason = "OutOfMemoryError: tried to allocate 16.00 GiB | free 3"
            slow = sweeps.job("math", us * 5, us * 11, of=of, environment=environment)
            found.append(slow if length < 8192 else sweeps.failed("out_of_memory", "math", reason, of=of))
    return [replace(record, finished_at=sweeps.NOON + 86400 * day) for record in found]


def comparisons(folder):
    """One comparison of each kind."""
    first = sweeps.sweep(folder / "first", records())
    second = sweeps.sweep(folder / "second", records(1.05, 1, "590.2", 1.03, day=1))
    nights = [
        sweeps.sweep(folder / f"night{day}", records(1.06 if day > 5 else 1.0, day, "590.2" if day > 5 else "580.1",
                                                     1 + 0.01 * (day % 2), day))
        for day in range(9)
    ]  # fmt: skip
    return {
        "rivals": compare(first, baseline="flash", by="causal"),
        "rivals_of_the_best": compare(first, where="q_len > 512 and pass == forward", metric="tflops", sort="-tflops"),
        "changes": compare(second, first, sort="verdict"),
        "history": compare(nights, history=True, where="backend == cudnn"),
    }


def outputs(folder):
    """Every golden file's name and what should stand in it."""
    found = {}
    for name, comparison in comparisons(folder).items():
        own = page(comparison)
        for form, ending in FORMATS.items():
            # Where a sweep lay is the machine's.
            found[f"compare/{name}{ending}"] = text_of(own, form).replace(str(folder), "FOLDER") + "\n"
    return found | explained.outputs(folder / "explained")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTN_EXP_STATE", str(folder / "state"))
        return outputs(folder), comparisons(folder)


def test_every_output_is_as_it_was(made):
    texts, _ = made
    assert {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*")} == set(texts)
    for name, text in texts.items():
        assert text == (GOLDEN / name).read_text(), f"{name}: python {__file__} writes it anew"


def test_tables_fit_120_columns(made):
    texts, _ = made
    for name, text in texts.items():
        if name.endswith(".txt"):
            for line in text.splitlines():
                assert len(line) <= 120 or line.startswith("attn-exp duel") or name == "explain/lines.txt", (name, line)


def test_the_numbers_are_the_same_in_all_formats(made):
    _, found = made
    for comparison in found.values():
        own = page(comparison)
        tree = json.loads(text_of(own, "json"))
        (rows, *others) = own.sheets
        assert list(csv.DictReader(io.StringIO(text_of(own, "csv")))) == [
            {name: "" if value is None else str(value) for name, value in row.items()} for row in tree["rows"]
        ]
        for sheet in (rows, *others):
            forms = {column.name: column.form for column in sheet.columns if column.joined is None}
            heads = {column.name: column.head for column in sheet.columns if column.joined is None and column.head}
            for values, texts, dictionary in zip(sheet.rows, sheet.texts(), tree[sheet.name], strict=True):
                by_name = dict(zip([column.name for column in sheet.columns], values, strict=True))
                for name, value in dictionary.items():
                    assert value == rounded(by_name[name])
                    if name in heads and isinstance(value, float):
                        # What a table shows is the rounding of what a file has, up to the last digit shown.
                        shown = texts[heads[name]].replace(",", "")
                        assert float(shown) == pytest.approx(float(written(value, forms[name])), rel=1e-3, abs=0.011)
        for form in ("table", "markdown"):
            text = text_of(own, form)
            for row in rows.texts():
                value = next(iter(row[head] for head in row if re.fullmatch(r"[\d.]+", row[head])), None)
                assert value is None or value in text


def test_a_markdown_cell_cannot_break_its_table(made):
    texts, _ = made
    for name, text in texts.items():
        if name.endswith(".md"):
            bars = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
            assert bars
            assert "16.00 GiB | free" not in "\n".join(line for line in text.splitlines() if line.startswith("|"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ["ATTN_EXP_STATE"] = f"{name}/state"
        for old in GOLDEN.glob("*/*"):
            old.unlink()
        for golden, content in outputs(Path(name)).items():
            (GOLDEN / golden).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / golden).write_text(content)
