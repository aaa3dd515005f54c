"""python docs/embed.py: puts results/h200/ into the README, and the tables of backends and statuses into their pages.

`tests/test_docs.py` fails while they differ.

A block begins with `<!-- table: FILE -->` (a text file as it is) or `<!-- summary: FILE -->` (a sentence made from
bench/sdpa_sweep.py's summary.json) and ends with `<!-- end -->`.
"""

import json
import re
from pathlib import Path

from attn_exp.commands.backends import ask, markdown
from attn_exp.core.status import status_table

ROOT = Path(__file__).resolve().parent.parent
_BACKENDS = re.compile(r"(<!-- backends -->\n).*?(<!-- end -->)", re.DOTALL)
_STATUSES = re.compile(r"(<!-- statuses -->\n).*?(<!-- end -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- (table|summary): (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def embedded(text: str, root: Path = ROOT) -> str:
    """The text with every block made anew from its file; a block whose file is not there stays as it is."""

    def block(match: re.Match[str]) -> str:
        begin, kind, path, old, end = match.groups()
        file = root / path
        if not file.exists():
            return match[0]
        new = f"```text\n{file.read_text().rstrip()}\n```\n" if kind == "table" else f"{sentence(file)}\n"
        return f"{begin}{new if new != old else old}{end}"

    return _BLOCK.sub(block, text)


def sentence(file: Path) -> str:
    """What bench/sdpa_sweep.py found, in words."""
    found = json.loads(file.read_text())
    return (
        f"That sweep took {found['attn_exp_s']:.1f} s on one {found['gpu']} with torch {found['torch']}, start-up, "
        f"checks and MLflow included.\n"
        f"A plain loop of PyTorch's `do_bench_using_profiling` over the same 30 configurations, without checks and\n"
        f"with nothing stored, took {found['plain_loop_s']:.1f} s. Of the {found['cells_above_50_us']} cells "
        f"above 50 us, {found['within_3_percent']} kernel times lie within 3 % of that loop's\n"
        f"(median difference {100 * found['median_disagreement']:.1f} %, largest "
        f"{100 * found['largest_disagreement']:.1f} %)."
    )


def with_backends(text: str) -> str:
    """The text of docs/backends.md with the table that the backends themselves declare."""
    answers = ask("cpu", None)
    return _BACKENDS.sub(lambda match: f"{match[1]}{markdown(answers)}\n{match[2]}", text)


def with_statuses(text: str) -> str:
    """The text of docs/records.md with the table of statuses from core/status.py."""
    return _STATUSES.sub(lambda match: f"{match[1]}{status_table()}\n{match[2]}", text)


if __name__ == "__main__":
    backends = ROOT / "docs" / "backends.md"
    backends.write_text(with_backends(backends.read_text()))
    records = ROOT / "docs" / "records.md"
    records.write_text(with_statuses(records.read_text()))
    readme = ROOT / "README.md"
    readme.write_text(embedded(readme.read_text()))
