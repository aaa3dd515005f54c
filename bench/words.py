"""python bench/words.py [PATHS]: words, pages and long or inverted sentences of the documentation and of docstrings.

Without PATHS it reads docs/*.md and the docstrings of attn_exp/. A path is a page, a module or a folder of them. Words
are what `wc -w` counts on a page; sentences are those of prose, without code, tables and headings.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INVERTED = re.compile(r"(Of|Where|Who|What|Nor)\b")
LONG = 35


def prose(page: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown text."""
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", page):
        if paragraph.strip() and not paragraph.lstrip().startswith(("|", "#", "!", "::")):
            yield re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(paragraph.split()))


def sentences(page: str) -> list[str]:
    """Return the sentences of a Markdown text, without marks of links, code and emphasis."""
    found = []
    for paragraph in prose(page):
        text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
        found += [
            re.sub(r"`|\*\*", "", part) for part in re.split(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`*\d])", text) if part
        ]
    return found


def docstrings(module: Path) -> str:
    """Return the docstrings of a module, its classes and functions, as paragraphs."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, kinds)]
    text = "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))
    # Each entry of a list of arguments is a sentence of its own.
    return re.sub(
        r"\n(?=    \*{0,2}\w+: |(?:Args|Attributes|Returns|Raises|Yields):$)", "\n\n", text, flags=re.MULTILINE
    )


def files(path: Path) -> list[Path]:
    """Return the pages and modules at a path."""
    return [path] if path.is_file() else sorted([*path.rglob("*.md"), *path.rglob("*.py")])


def report(name: str, texts: list[str]) -> str:
    """Return a line about some texts."""
    every = [sentence for text in texts for sentence in sentences(text)]
    count = max(1, len(every))
    inverted = sum(bool(INVERTED.match(sentence)) for sentence in every)
    long = sum(len(sentence.split()) > LONG for sentence in every)
    words = sum(len(text.split()) for text in texts)
    return (
        f"{name}: {words:,} words, {len(texts)} files, {len(every):,} sentences; begin with Of/Where/Who/What/Nor "
        f"{100 * inverted / count:.1f} %, above {LONG} words {100 * long / count:.1f} %"
    )


if __name__ == "__main__":
    given = [file for path in sys.argv[1:] for file in files(Path(path))]
    chosen = given or [*sorted((ROOT / "docs").glob("*.md")), *files(ROOT / "attn_exp")]
    pages = [file.read_text() for file in chosen if file.suffix == ".md"]
    modules = [text for file in chosen if file.suffix == ".py" and (text := docstrings(file))]
    for name, texts in (("pages", pages), ("docstrings", modules)):
        if texts:
            print(report(name, texts))
