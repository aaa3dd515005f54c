"""A sweep in brief, as Markdown: its answer, what each backend is over all cases, and the best row of each case."""

from collections.abc import Sequence

from attn_exp.compare.page_parts import shared_line, shared_values
from attn_exp.compare.ranking import Ranking, by_group, challengers, leader, outcome, picks, rank
from attn_exp.compare.ratio import ratio
from attn_exp.compare.rivals import Rivals
from attn_exp.compare.rule import times_text
from attn_exp.compare.sheet import of_all, written
from attn_exp.compare.standing import Standings
from attn_exp.core.safe_text import markdown_text
from attn_exp.core.text import grid, printable

# Rows of the best of each case; the report has all.
_CASES = 24


def answer_in_brief(rivals: Rivals) -> str:
    """Return the answer of a sweep as Markdown: what is decided in bold, what is open, and the command for that."""
    answer = rivals.answer
    decided = [*answer.said(), *filter(None, [answer.warning])]
    # One paragraph: MLflow shows 100 pixels of a description, which is five lines of one, and folds the rest.
    parts = ["  \n".join(f"**{safe(line)}**" for line in decided)]
    for said, *commands in (*(one.lines() for one in answer.cautions), answer.next_step()):
        parts += [safe(said), *(code(command) for command in commands if command)]
    return "\n\n".join(filter(None, parts))


def tables_in_brief(rivals: Rivals, found: Standings) -> str:
    """Return what all rows share, each backend over all cases, and the best of each case, as Markdown."""
    shared = safe(shared_line(shared_values([row.cell for row in rivals.rows])))
    return "\n\n".join(filter(None, [_means(found), _best(rivals), shared and f"All cases: {shared}."]))


def code(text: str) -> str:
    """Return text as a block of Markdown that shows it literally."""
    inside = "\n".join(printable(line).replace("```", "` ` `") for line in text.splitlines())
    return f"```\n{inside}\n```"


def safe(text: str) -> str:
    """Return text on one line that Markdown shows literally."""
    return markdown_text(printable(text))


def _means(found: Standings) -> str:
    if len({one.label for one in found.backends if one.speedup is not None}) < 2:
        return ""
    rows = [
        {
            "backend": safe(one.label),
            "pass": one.direction,
            "cases": of_all(one.n, one.cases),
            f"times as fast as {safe(found.baseline)}": written(one.speedup, "ratio"),
            "surely best in": str(one.best),
        }
        for one in found.backends
    ]
    fewer = any(one.n < one.cases for one in found.backends)
    said = ", which only compare where they are over the same cases" if fewer else ""
    return f"Geometric means{said}:\n\n{grid(rows, list(rows[0]), 'pipe')}"


def _best(rivals: Rivals) -> str:
    several = [group for group in by_group(rivals.rows) if outcome(group) != "single"]
    rows = [_best_row(group, rivals) for group in several[:_CASES]]
    if not rows:
        return ""
    told = [column for column in rows[0] if any(row[column] for row in rows)]
    rows = [{column: row[column] for column in told} for row in rows]
    rest = len(several) - _CASES
    more = [f"... and {rest} more in table.csv"] if rest > 0 else []
    return "\n\n".join(["The best of each case:", grid(rows, list(rows[0]), "pipe"), *more])


def _best_row(group: Sequence[Ranking], rivals: Rivals) -> dict[str, str]:
    first = leader(group, rivals.metric)
    assert first is not None
    cell, found = first.cell, outcome(group)
    # Names of one kernel are one pick.
    same = sorted(picks(group).intersection(first.same))
    close = sorted(picks(group).difference(same, (cell.result.label,)))
    perhaps = [f"{row.cell.result.label} ({row.doubt})" for row in challengers(group)]
    name = " = ".join([cell.result.label, *same])
    best, value = ("undecided", "") if found == "open" else (safe(name), written(cell.value, "figure"))
    return {
        "case": safe(cell.result.case.brief()),
        "pass": cell.direction,
        "best": best,
        str(rivals.metric): value,
        "times as good as the next": _over_the_next(group, first, rivals) if found == "sure" else "",
        "too close to call": safe(", ".join(close)),
        "may be better": safe(", ".join(perhaps)),
    }


def _over_the_next(group: Sequence[Ranking], first: Ranking, rivals: Rivals) -> str:
    """Return how many times better the best row is than the next one, with its 95 % interval; empty if unknown."""
    others = [
        row
        for row in group
        if row.cell.value is not None and row is not first and row.cell.result.label not in first.same
    ]
    if not others:
        return ""
    next_best = min(others, key=lambda row: rank(row.cell, rivals.metric))
    spread = rivals.spreads.between_rows(first.cell.result, next_best.cell.result)
    over = first.duels.get(next_best.cell.result.label) or ratio(first.cell, next_best.cell, rivals.metric, spread)
    if over is None:
        return ""
    value, low, high = map(times_text, (over.value, over.low, over.high))
    return safe(f"{value} [{low}, {high}] {next_best.cell.result.label}")
