"""python -m cheats.page: write docs/cheats.md from the entries of the corpus."""

from pathlib import Path

from cheats.corpus import BOTH, REPORTS, Entry, load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cheats.md"

# Each class and what its backends have in common, in the order of the page.
GROUPS = {
    "memory": "An output that was computed once is returned again.",
    "parts": "A part of the result is never computed.",
    "formula": "The result is that of another formula, which N(0, 1) hardly tells from the case's.",
    "precision": "The result has fewer bits than the case asks for.",
    "gradients": "The backward does less than a backward, or its work is done elsewhere.",
    "laziness": "What a call returns is no result yet, or no tensor of the right kind.",
    "clock": "The process that measures is changed: its clocks, its functions, its settings.",
    "threads": "On a CPU, threads and processes that compute beside the given ones, or after a call.",
    "streams": "Work that the call's stream does not wait for, or that is done between the calls.",
    "graphs": "Other work while a CUDA graph is captured, or inputs that a graph keeps.",
    "behaviour": "Honest only while somebody looks.",
    "kernels": "Other kernels than the claimed one do the work.",
    "triton": "One mistake in a Triton kernel; also run in Triton's interpreter on a CPU.",
    "inputs": "The inputs are written, freed, or named wrongly.",
    "bad input": "The backend breaks down in a later judgement; the next job is measured all the same.",
    "blocks": "The same inside a transformer block, and compiled.",
    "fp8": "The same in fp8.",
    "duel": "The same in a duel, whose honest rival must end `ok`.",
    "honest": "Unusual, but right: these must end `ok`.",
}

_INTRO = """\
# Backends that cheat

Benchmarks of kernels are cheated every day, by accident and on purpose: outputs are cached, tensors are lazy, clocks
are patched, half of a batch is computed. This page lists {cheats} backends that cheat or err, in {groups} classes, and
{honest} honest ones that do something unusual. Every cheat must end with the status below, with a reason that matches
the words below (a regular expression), and so without a number; every honest one must end `ok`. The backends are in
[tests/cheats/](../tests/cheats/__init__.py), and `tests/test_cheats.py` measures each of them; those marked GPU
need one, and `tests/gpu/test_gpu_cheats.py` measures them. How results are checked is in [accuracy.md](accuracy.md).

The list is generated: `cd tests && python -m cheats.page`. "Seen in" names public reports of such a cheat or mistake.

| class | backends | what they have in common |
|---|--:|---|
{classes}
"""


def page() -> str:
    """Return the page as Markdown."""
    entries = load()
    by_group = {group: [entry for entry in entries if entry.group == group] for group in GROUPS}
    left_over = {entry.group for entry in entries} - GROUPS.keys()
    assert not left_over, f"GROUPS lacks {left_over}"
    filled = {group: found for group, found in by_group.items() if found}
    honest = len(filled["honest"])
    rows = [f"| [{group}](#{_anchor(group)}) | {len(found)} | {GROUPS[group]} |" for group, found in filled.items()]
    parts = [
        _INTRO.format(cheats=len(entries) - honest, groups=len(filled) - 1, honest=honest, classes="\n".join(rows))
    ]
    for group, found in filled.items():
        parts.append(f"## {group.capitalize()}\n\n{GROUPS[group]}\n\n{_table(group, found)}\n")
    links = "\n".join(f"- [{name}]({url})" for name, url in REPORTS.items())
    parts.append(f"## Reports\n\n{links}\n")
    return "\n".join(parts)


def _anchor(group: str) -> str:
    return group.replace(" ", "-")


def _table(group: str, entries: list[Entry]) -> str:
    if group == "honest":
        lines = ["| backend | what it does | case |", "|---|---|---|"]
        return "\n".join([*lines, *(f"| `{one.name}` | {one.about} | {_case(one)} |" for one in entries)])
    lines = ["| backend | what it does | case | must end as | words | seen in |", "|---|---|---|---|---|---|"]
    for one in entries:
        statuses = " or ".join(f"`{status}`" for status in one.statuses)
        words = (one.words or "").replace("|", "\\|")
        seen = ", ".join(f"[{name}]({REPORTS[name]})" for name in one.seen)
        lines.append(f"| `{one.name}` | {one.about} | {_case(one)} | {statuses} | `{words}` | {seen} |")
    return "\n".join(lines)


def _case(entry: Entry) -> str:
    passes = "" if entry.passes == BOTH else f", {entry.passes[0]}"
    more = ", compiled" if entry.compile.mode != "none" else ""
    more += ", duel" if entry.rival else ", GPU" if entry.device == "cuda" else ""
    return f"{entry.case.label()}{passes}{more}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
