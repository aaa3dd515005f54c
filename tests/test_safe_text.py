"""Names and reasons may contain what Markdown or a spreadsheet would render: it is shown literally."""

import pytest

from attn_exp.core.sheet.render import grid, markdown_text, sheet_csv, sheet_markdown
from attn_exp.core.sheet.sheet import Column, Sheet, commands_of, sheet_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[x](javascript:alert(1))", r"[x\](javascript:alert(1))"),
        ("```\nfence\n```", r"\`\`\` fence \`\`\`"),
        ("a | b", r"a \| b"),
        ("<img src=x>", "&lt;img src=x>"),
        ("**bold** head_dim [1.0, 2.0]", r"\*\*bold\*\* head_dim [1.0, 2.0]"),
    ],
)
def test_markdown_shows_it_literally(text: str, shown: str) -> None:
    assert markdown_text(text) == shown


def test_heads_of_a_table_are_literal_too():
    (heads, *_) = sheet_markdown(sheet_of([{"<img src=x> | b": "*fast"}])).splitlines()
    assert heads.split("  ")[0] == r"| &lt;img src=x> \| b"


def test_a_spreadsheet_runs_no_formula_of_a_cell():
    rows = [{"name": "=1+1", "less": -1.5, "text": "-1.5e-3", "other": "-A1", "at": "@SUM(A1)"}]
    assert sheet_csv(sheet_of(rows)).splitlines()[1] == "'=1+1,-1.5,-1.5e-3,'-A1,'@SUM(A1)"


def test_commands_with_names_of_a_record_command_no_terminal():
    sheet = Sheet("ties", "", (Column("command", "command"),), (("attn-exp duel a=\x1b[31m\u202e 'b  c'",),))
    assert commands_of(sheet) == ["attn-exp duel a=[31m 'b  c'"]


def test_a_table_commands_no_terminal():
    text = grid(sheet_of([{"\x1b]0;x\x07name": "\x1b[31m\u202e1", "us\n+-%": 1}]))
    assert not set(text) & set("\x1b\x07\u009b\u202e")
    assert [line.split() for line in text.splitlines()[:2]] == [["]0;xname", "us"], ["+-%"]]
