"""The output of `attn-exp reproduce`: figures beside our measurements, and the list of sources."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from textwrap import shorten
from typing import Any, get_args

from attn_exp.comparison.columns import row_sheet
from attn_exp.core.case.fields import case_columns
from attn_exp.core.case.filter import Getter
from attn_exp.core.sheet.sheet import Column, Headline, Page, Pairs, Sheet
from attn_exp.core.text import SHORT
from attn_exp.reproduce.figures import Figure, Status
from attn_exp.reproduce.judged import Judged
from attn_exp.results.fields import kept_by


def _interval(values: dict[str, Any]) -> str:
    return "" if values["low"] is None else f"{values['low']:.3f} to {values['high']:.3f}"


# The columns of a ratio with its interval.
RATIO = (
    (Column("ratio", "ratio", "ratio"), attrgetter("ratio")),
    (Column("low", "", "ratio"), attrgetter("low")),
    (Column("high", "", "ratio"), attrgetter("high")),
    (Column("interval", "95 % interval", joined=_interval), None),
)
# A library's message may fill a page.
_REASON = 140

_FIELDS: dict[str, Getter] = {
    "source": attrgetter("source.name"),
    **{name: attrgetter(name) for name in ("id", "library", "backend")},
    "gpu": lambda figure: figure.source.chip.name if figure.source.chip else figure.source.gpu,
    "pass": attrgetter("direction"),
    **{name: attrgetter(name) for name in ("status", "deterministic")},
    "seq_len": lambda figure: max(figure.case.q_len, figure.case.kv_len),
    **{name: attrgetter(name) for name in ("tflops", "time_us")},
    **{name: attrgetter(f"case.{name}") for name in case_columns()},
}


def filtered(figures: Sequence[Figure], expression: str) -> list[Figure]:
    """Return the figures for which an expression holds. Raises UserError if it is wrong, or holds for none."""
    return kept_by(expression, figures, _FIELDS, f"the fields are {', '.join(_FIELDS)}", "figures")


def sources_page(figures: Sequence[Figure]) -> Page:
    """Return the page that lists the sources, with how many of their figures have which status."""
    by_source: dict[str, list[Figure]] = {}
    for figure in figures:
        by_source.setdefault(figure.source.name, []).append(figure)
    statuses = get_args(Status)
    columns = (
        Column("source", "source"),
        Column("figures", "figures"),
        Column("gpu", "GPU"),
        *(Column(name, name.replace("_", " ")) for name in statuses),
        Column("title", ""),
        Column("url", ""),
    )
    rows = []
    for name, group in by_source.items():
        counts, source = Counter(figure.status for figure in group), group[0].source
        rows.append((name, len(group), source.gpu, *(counts[status] for status in statuses), source.title, source.url))
    counts = Counter(figure.status for figure in figures)
    each = (f"{counts[status]} {status.replace('_', ' ')}" for status in statuses if counts[status])
    headline = f"{len(figures)} figures of {len(rows)} sources: {', '.join(each)}"
    return Page(
        {"kind": "sources", "figures": len(figures)}, (headline,), (Sheet("sources", "", columns, tuple(rows)),), ()
    )


def judged_page(judged: Sequence[Judged]) -> Page:
    """Return the page of figures beside what was measured: figure, ours, ratio with interval, verdict."""
    mixed = len({row.figure.source.name for row in judged}) > 1
    pairs: Pairs = (
        (Column("figure", "figure"), lambda row: row.figure.name if mixed else row.figure.id),
        (Column("published", "published", "figure"), lambda row: row.figure.value[0]),
        (Column("unit", "unit"), lambda row: row.figure.value[1]),
        (Column("ours", "ours", "figure"), lambda row: row.ours),
        *RATIO,
        (Column("verdict", "verdict"), lambda row: row.said),
        (Column("status", ""), lambda row: row.figure.status),
        (Column("differs", "measured differently", spare=1), lambda row: row.differs),
        (Column("pass", ""), lambda row: SHORT.get(row.figure.direction, row.figure.direction)),
        (Column("case", ""), lambda row: row.figure.case.label()),
        (Column("backend", ""), lambda row: row.figure.backend or ""),
        (Column("gpu", ""), lambda row: row.figure.source.gpu),
        (Column("our_gpu", ""), lambda row: row.measured.gpu if row.measured else ""),
        (Column("counting", ""), lambda row: row.figure.source.counting),
        (Column("measured_in", ""), lambda row: row.measured.place if row.measured else ""),
        (Column("overrides", ""), lambda row: " ".join(row.figure.words())),
        (Column("url", ""), lambda row: row.figure.source.url),
        (Column("place", ""), lambda row: row.figure.source.place),
    )
    counts = Counter(row.verdict for row in judged if row.verdict is not None)
    without = len(judged) - sum(counts.values())
    parts = [f"{counts[name]} {name.replace('_', ' ')}" for name in get_args(Status)[:4]]
    summary = f"of {len(judged)} figures {', '.join(parts)}, {without} without a verdict"
    elsewhere = sorted(
        {
            f"{row.figure.source.gpu} there, {row.measured.gpu} here: another GPU, so no verdict"
            for row in judged
            if row.measured is not None and row.ratio is not None and row.verdict is None
        }
    )
    sources = {row.figure.source.name: row.figure.source for row in judged}.values()
    notes = (
        "ratio: our rate over theirs; reproduced: the whole interval within 3 %; contradicted: all of it beyond 10 %; "
        "faster at full clock: so it is, by no more than a burst's clock explains; beside: between these",
        *elsewhere,
        *(f"{source.title}: {source.url} ({source.place})" for source in sources),
        *(f"{source.name}: {source.note}" for source in sources if source.note),
        *(f"{row.figure.id}: {row.figure.note}" for row in judged if row.figure.note),
        *(
            f"{row.figure.id}: {shorten(row.measured.reason, _REASON)}"
            for row in judged
            if row.measured is not None and row.measured.reason
        ),
    )
    verdicts: dict[str, int] = {str(name): count for name, count in counts.items()}
    about = {"kind": "reproduced", "figures": len(judged), **verdicts}
    return Page(about, (), (row_sheet(judged, pairs),), notes, headline=Headline((summary,)))
