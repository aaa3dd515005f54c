"""The tables of bench/hard_values.py."""

import csv
import re
from importlib import metadata
from pathlib import Path

from accuracy import FIELDS, WRONG
from hard_worker import Row
from tabulate import tabulate

from attn_exp.core.catalogue import packages
from attn_exp.core.conf import conf_folder

REFUSED = ("unsupported", "unavailable")


def write_tables(out: Path, rows: list[Row], kinds: list[str], title: str, left_out: str) -> None:
    """Write hard_values.csv and hard_values.md; a reader sees the old ones or the new ones."""
    unfinished = out / "hard_values.csv.new"
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["kind", *FIELDS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            for row in rows
            if row["status"] not in REFUSED
        )
    unfinished.replace(out / "hard_values.csv")
    unfinished = out / "hard_values.md.new"
    unfinished.write_text(markdown(rows, kinds, title, left_out))
    unfinished.replace(out / "hard_values.md")


def table(rows: list[Row], kinds: list[str], form: str) -> str:
    """Wrong cases of those that ran, by backend and kind; backends that ran nothing are left out."""
    ran: dict[tuple[object, object], set[object]] = {}
    wrong: dict[tuple[object, object], set[object]] = {}
    for row in rows:
        cell = row["backend"], row["kind"]
        if row["status"] not in REFUSED:
            ran.setdefault(cell, set()).add(row["index"])
        if row["status"] in WRONG:
            wrong.setdefault(cell, set()).add(row["index"])
    lines = []
    for name in dict.fromkeys(name for name, _ in ran):
        cells = [(name, kind) for kind in kinds]
        lines.append([name, *(f"{len(wrong.get(cell, ()))}/{len(ran[cell])}" if cell in ran else "" for cell in cells)])
    return tabulate(lines, ["backend", *kinds], tablefmt=form)


def markdown(rows: list[Row], kinds: list[str], title: str, left_out: str) -> str:
    """The table, and a line for each backend, kind and reason that is wrong."""
    parts = ["# Hard values", title, "Wrong cases of those that ran:", table(rows, kinds, "github")]
    wrong: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] in WRONG:
            wrong.setdefault((str(row["backend"]), str(row["kind"])), []).append(row)
    lines = [
        [name, kind, len({row["index"] for row in several}), several[0]["case"], several[0]["reason"], sources(kind)]
        for (name, kind), several in wrong.items()
    ]
    headers = ["backend", "inputs", "cases", "for example", "reason", "reports of such values"]
    parts += ["What is wrong:", tabulate(lines, headers, tablefmt="github")] if lines else ["Nothing is wrong."]
    absent = {str(row["backend"]): str(row["reason"]) for row in rows if row["status"] == "unavailable"}
    parts += ["\n".join(f"- {name} did not run: {reason}" for name, reason in sorted(absent.items()))]
    parts += [f"Left out, since the time was over: {left_out}."] if left_out else []
    return "\n\n".join(part for part in parts if part) + "\n"


def sources(kind: str) -> str:
    """The public reports that the file of a kind names."""
    text = (conf_folder() / "inputs" / f"{kind}.yaml").read_text()
    return ", ".join(dict.fromkeys(re.findall(r"[\w-]+#\d+|arXiv:\d+\.\d+", text)))


def versions() -> str:
    """The installed versions of torch and of the backends' packages."""
    found = []
    for name in dict.fromkeys(("torch", "triton", *packages())):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
