"""A site of histories: a page of all cells, and one of each case with its charts; files that need no server."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_exp.compare.history import LEAST, History, Trend
from attn_exp.compare.pages import history_page, page
from attn_exp.compare.sheet import Picture
from attn_exp.compare.trend_chart import environment_changes, trend_chart
from attn_exp.compare.web import html
from attn_exp.core.case import PASSES

INDEX = "index.html"
CASE_PAGE = re.compile(r"case-[0-9a-f]{10}\.html")
# Charts on the first page: those of cases that changed level.
_FIRST = 12


@dataclass(frozen=True)
class _CasePage:
    name: str
    title: str
    rows: tuple[Trend, ...]
    charts: tuple[Picture, ...]

    @property
    def turns(self) -> int:
        return sum(len(row.turns) for row in self.rows)

    @property
    def link(self) -> tuple[str, str]:
        changed = f", {self.turns} changes of level" if self.turns > 1 else ", 1 change of level" if self.turns else ""
        return self.name, f"{self.title}: {len(self.rows)} {'curve' if len(self.rows) == 1 else 'curves'}{changed}"


def site_of(history: History, title: str) -> dict[str, str]:
    """Return the HTML of each file of the site by its name; the first page comes last."""
    cases = _case_pages(history)
    files = {
        one.name: html(
            history_page(replace(history, rows=one.rows, notes=(), broken=())),
            one.charts,
            title=one.title,
            links=[(INDEX, f"all cases of {title}")],
        )
        for one in cases
    }
    first = page(history)
    few = f"{len(history.sweeps)} sweeps" if len(history.sweeps) > 1 else "one sweep"
    if len(history.sweeps) < LEAST:
        first = replace(first, notes=(f"{few}: a history needs {LEAST} or more", *first.notes))
    changed = [chart for one in cases if one.turns for chart in _turned(one)]
    files[INDEX] = html(first, changed[:_FIRST], title=title, links=[one.link for one in cases])
    return files


def _case_pages(history: History) -> list[_CasePage]:
    """Return the pages of the cases, those that changed level first."""
    by_case: dict[str, list[Trend]] = defaultdict(list)
    for row in history.rows:
        by_case[f"{row.cell.result.model} {row.cell.result.case.label()}".strip()].append(row)
    changes = environment_changes(history.sweeps)
    pages = []
    for title, rows in by_case.items():
        passes = [[row for row in rows if row.cell.direction == name] for name in PASSES]
        charts = [trend_chart(history, own, changes) for own in passes if own]
        name = f"case-{hashlib.sha256(title.encode()).hexdigest()[:10]}.html"
        pages.append(_CasePage(name, title, tuple(rows), tuple(charts)))
    return sorted(pages, key=lambda one: -one.turns)


def _turned(case: _CasePage) -> Sequence[Picture]:
    """Return the charts of the passes in which a backend changed level."""
    passes = {row.cell.direction for row in case.rows if row.turns}
    return [chart for chart in case.charts if chart.title.rpartition(" ")[2] in passes]
