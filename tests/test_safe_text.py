"""Words from records: what a terminal, Markdown and a spreadsheet would obey is shown and not obeyed."""

import csv
import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps
from hypothesis import given
from hypothesis import strategies as st

from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.explain import main as explain_main
from attn_exp.core.record_file import FILE_NAME, read_record
from attn_exp.core.safe_text import csv_cell, markdown_text, printable_json
from attn_exp.results.read import read_folder
from attn_exp.results.table import csv_text, table

LIVE = "\x1b]0;owned\x07 \x1b[2J\x9b31m \u202edesrever\u2069 \x08\x7f"
OBEYED = {"Cc", "Cf"}


def obeyed(text: str) -> set[str]:
    """Return the characters of a text that a terminal obeys."""
    return {letter for letter in text if unicodedata.category(letter) in OBEYED and letter not in "\n\t"}


def hostile(text: str) -> object:
    record = sweeps.failed(backend="math", reason=f"it says {text}")
    options = {**record.request.backend, "note": text}
    return replace(record, request=replace(record.request, backend=options))


def test_escape_sequences_of_a_record_reach_no_terminal_and_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = sweeps.write(tmp_path / "multirun" / "first", [sweeps.job(), hostile(LIVE)])  # type: ignore[list-item]
    stored = next(path for path in folder.glob(f"math-*/{FILE_NAME}"))
    # As others write JSON: raw where JSON allows it.
    stored.write_text(json.dumps(json.loads(stored.read_bytes()), ensure_ascii=False))
    assert "\u202e" in stored.read_text()
    record = read_record(stored.parent)
    assert record is not None
    assert record.reason is not None
    assert "it says" in record.reason
    assert obeyed(record.reason) == set()
    results = read_folder(folder).results
    assert obeyed(table(results) + csv_text(results)) == set()
    for form in ("table", "markdown", "csv", "json", "latex", "html"):
        assert compare_main(["first", f"format={form}"]) == 0
        out, err = capsys.readouterr()
        assert obeyed(out + err) == set(), form
    assert explain_main(["first"]) == 0
    out, err = capsys.readouterr()
    assert obeyed(out + err) == set()


@given(st.text())
def test_json_stays_json_and_only_what_is_obeyed_changes(text: str) -> None:
    for ascii_only in (True, False):
        content = json.dumps({"a\\": [text, "\\"]}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        (read, backslash) = json.loads(printable_json(content).decode("utf-8", "surrogatepass"))["a\\"]
        assert backslash == "\\"
        kept = [letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc"]
        marks = {*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
        assert read.replace("?", "") == "".join(one for one in kept if one not in marks).replace("?", "")
        assert len(read) == len(text)


def test_text_that_has_nothing_to_obey_is_not_touched() -> None:
    content = json.dumps({"reason": "a \\u001b of letters, a\nline, grün"}, ensure_ascii=False).encode()
    assert printable_json(content) == content


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[x](javascript:alert(1))", r"[x\](javascript:alert(1))"),
        ("![x](http://host/seen.png)", r"![x\](http://host/seen.png)"),
        ("```\nfence\n```", r"\`\`\` fence \`\`\`"),
        ("a | b", r"a \| b"),
        ("<img src=x>", "&lt;img src=x>"),
        ("**bold** head_dim [1.0, 2.0]", r"\*\*bold\*\* head_dim [1.0, 2.0]"),
    ],
)
def test_markdown_shows_it_literally(text: str, shown: str) -> None:
    assert markdown_text(text) == shown


@pytest.mark.parametrize(
    "formula", ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", "\tx", "\r=1", "\n=1", "\uff1d1+1"]
)
def test_a_spreadsheet_computes_nothing(formula: str, tmp_path: Path) -> None:
    assert csv_cell(formula) == f"'{formula}"
    sweep = sweeps.sweep(tmp_path / "s", [sweeps.failed(backend="math", reason=formula)])
    (row,) = csv.DictReader(csv_text(sweep.results).splitlines())
    assert not row["reason"].startswith(("=", "@", "+", "-", "\t", "\r", "\n", "\uff1d"))


@pytest.mark.parametrize("value", [-1.5, "-1.5", "+1e-3", "text", None, 3, True])
def test_numbers_and_words_stay(value: object) -> None:
    assert csv_cell(value) == value
