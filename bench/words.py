"""python bench/words.py [PATHS]: how many sentences are inverted or long in pages, docstrings, comments and messages.

Without PATHS it reads docs/*.md, attn_exp/ and the names of the tests. A path is a page, a module or a folder of them.
Words are what `wc -w` counts on a page; sentences are those of prose, without code, tables and headings. A message is
what `raise` and `print` are given, and `UserError` wherever it is made. The name of a test counts as a sentence.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("Of", "Where", "Who", "What", "Nor")
INVERTED = re.compile(rf"({'|'.join(WORDS)})\b")
LONG = 35
KINDS = ("pages", "docstrings", "comments", "messages", "test names")


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
        parts = re.split(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`*\d])", text)
        found += [re.sub(r"`|\*\*", "", part) for part in parts if part]
    return found


def docstrings(tree: ast.Module) -> str:
    """Return the docstrings of a module, its classes and functions, as paragraphs."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    text = "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))
    # Each entry of a list of arguments is a sentence of its own.
    return re.sub(r"(?m)\n(?=    \*{0,2}\w+: |(?:Args|Attributes|Returns|Raises|Yields):$)", "\n\n", text)


def comments(source: str) -> str:
    """Return the comments of a module, those on lines in a row as one paragraph."""
    found, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#(!|\s*(fmt:|noqa|type:|mypy:))", token.string):
            words = token.string.lstrip("# ")
            # A comment behind code is a paragraph of its own.
            own_line = not token.line[: token.start[1]].strip()
            found += f"{' ' if own_line and token.start[0] == last + 1 else chr(10) * 2}{words}"
            last = token.start[0] if own_line else -1
    return found


def messages(tree: ast.Module) -> str:
    """Return the strings that a module raises and prints, a paragraph each; what is formatted in is an ellipsis."""
    nodes = list(ast.walk(tree))
    given = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    given += [node for node in nodes if getattr(getattr(node, "func", None), "id", "") in ("print", "UserError")]
    texts: dict[int, str] = {}
    for node in given:
        for one in node.args if isinstance(node, ast.Call) else []:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                texts[id(one)] = one.value
            elif isinstance(one, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in one.values)
                texts[id(one)] = "".join(map(str, parts))
    return "\n\n".join(text for text in texts.values() if re.search("[A-Za-z]{2}", text))


def test_names(tree: ast.Module) -> str:
    """Return the names of a module's tests as sentences."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return "\n\n".join(name[5:].replace("_", " ").capitalize() for name in names if name.startswith("test_"))


def files(path: Path) -> list[Path]:
    """Return the pages and modules at a path."""
    return [path] if path.is_file() else sorted([*path.rglob("*.md"), *path.rglob("*.py")])


def row(kind: str, texts: list[str]) -> list[object]:
    """Return the row of the table about texts of a kind."""
    every = [sentence for text in texts for sentence in sentences(text)]
    count = max(1, len(every))
    begins = [sum(bool(re.match(rf"{word}\b", sentence)) for sentence in every) for word in WORDS]
    long = sum(len(sentence.split()) > LONG for sentence in every)
    words = sum(len(text.split()) for text in texts)
    shares = (f"{100 * some / count:.1f} %" for some in (sum(begins), long))
    return [kind, len(texts), f"{words:,}", f"{len(every):,}", *begins, *shares]


if __name__ == "__main__":
    given = [file for path in sys.argv[1:] for file in files(Path(path))]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    chosen = given or [*sorted((ROOT / "docs").glob("*.md")), *files(ROOT / "attn_exp"), *tests]
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for file in chosen:
        source = file.read_text()
        if file.suffix == ".md":
            texts["pages"].append(source)
            continue
        tree, whole = ast.parse(source), given or file not in tests
        found = (docstrings(tree), comments(source), messages(tree)) if whole else ("", "", "")
        for kind, text in zip(KINDS[1:], (*found, test_names(tree)), strict=True):
            texts[kind] += [text] if text else []
    heads = ["", "files", "words", "sentences", *WORDS, "inverted", f"above {LONG} words"]
    print(tabulate([row(kind, texts[kind]) for kind in KINDS if texts[kind]], heads, disable_numparse=True))
