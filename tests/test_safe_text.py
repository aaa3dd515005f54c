"""Names and reasons may contain what Markdown would render: it is shown literally."""

import pytest

from attn_exp.core.text import markdown_text


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
