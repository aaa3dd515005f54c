"""The output of `attn-exp reproduce`: figures beside our measurements, and the list of sources."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from attn_exp.core.case.fields import case_columns
from attn_exp.core.case.filter import Filter, Getter
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.sheet import Column, Headline, Page, Sheet, split
from attn_exp.core.text import SHORT
from attn_exp.reproduce.figures import Figure, Status
from attn_exp.reproduce.judged import Judged

_FIELDS: dict[str, Getter] = {
    "source": lambda one: one.source.name,
    "id": lambda one: one.id,
    "library": lambda one: one.library,
    "backend": lambda one: one.backend,
    "gpu": lambda one: one.source.chip.name if one.source.chip else one.source.gpu,
    "pass": lambda one: one.direction,
    "status": lambda one: one.status,
    "deterministic": lambda one: one.deterministic,
    "seq_len": lambda one: max(one.case.q_len, one.case.kv_len),
    "tflops": lambda one: one.tflops,
    "time_us": lambda one: one.time_us,
    **{name: lambda one, name=name: getattr(one.case, name) for name in case_columns()},  # type: ignore[misc]
}


def filtered(figures: Sequence[Figure], expression: str) -> list[Figure]:
    """Return the figures for which an expression holds. Raises UserError if it is wrong, or holds for none."""

    def values(name: str) -> list[Any]:
        return [value for value in dict.fromkeys(map(_FIELDS[name], figures)) if value is not None]

    filter_ = Filter(expression, _FIELDS, values, f"the fields are {', '.join(_FIELDS)}")
    test = filter_.test()
    kept = [one for one in figures if test(one)]
    if not kept:
        raise UserError(f"{filter_.shown} matches none of the {len(figures)} figures: relax it")
    return kept


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
    for name, own in by_source.items():
        counts, source = Counter(one.status for one in own), own[0].source
        rows.append((name, len(own), source.gpu, *(counts[one] for one in statuses), source.title, source.url))
    said = f"{len(figures)} figures of {len(rows)} sources"
    return Page(
        {"kind": "sources", "figures": len(figures)}, (said,), (Sheet("sources", "", columns, tuple(rows)),), ()
    )


def judged_page(judged: Sequence[Judged]) -> Page:
    """Return the page of figures beside what was measured: figure, ours, ratio with interval, verdict."""
    several = len({one.figure.source.name for one in judged}) > 1
    columns, values = split(
        (
            (Column("figure", "figure"), lambda one: one.figure.name if several else one.figure.id),
            (Column("published", "published", "figure"), lambda one: one.figure.value[0]),
            (Column("unit", "unit"), lambda one: one.figure.value[1]),
            (Column("ours", "ours", "figure"), lambda one: one.ours),
            (Column("ratio", "ratio", "ratio"), lambda one: one.ratio),
            (Column("low", "", "ratio"), lambda one: one.low),
            (Column("high", "", "ratio"), lambda one: one.high),
            (Column("interval", "95 % interval", joined=_interval), None),
            (Column("verdict", "verdict"), lambda one: one.said),
            (Column("status", ""), lambda one: one.figure.status),
            (Column("differs", "measured differently", spare=1), lambda one: one.differs),
            (Column("pass", ""), lambda one: SHORT.get(one.figure.direction, one.figure.direction)),
            (Column("case", ""), lambda one: one.figure.case.label()),
            (Column("backend", ""), lambda one: one.figure.backend or ""),
            (Column("gpu", ""), lambda one: one.figure.source.gpu),
            (Column("our_gpu", ""), lambda one: one.measured.gpu if one.measured else ""),
            (Column("counting", ""), lambda one: one.figure.source.counting),
            (Column("measured_in", ""), lambda one: one.measured.place if one.measured else ""),
            (Column("overrides", ""), lambda one: " ".join(one.figure.words())),
            (Column("url", ""), lambda one: one.figure.source.url),
            (Column("place", ""), lambda one: one.figure.source.place),
        )
    )
    rows = tuple(map(values, judged))
    counts = Counter(one.verdict for one in judged if one.verdict is not None)
    without = len(judged) - sum(counts.values())
    parts = [f"{counts[name]} {name}" for name in ("reproduced", "beside", "contradicted")]
    said = f"of {len(judged)} figures {', '.join(parts)}, {without} without a verdict"
    other = sorted(
        {
            f"{one.figure.source.gpu} there, {one.measured.gpu} here: another GPU, so no verdict"
            for one in judged
            if one.measured is not None and one.ratio is not None and one.verdict is None
        }
    )
    sources = {one.figure.source.name: one.figure.source for one in judged}.values()
    notes = (
        "ratio: our rate over theirs; reproduced: the whole interval within 3 %; contradicted: all of it beyond 10 %; "
        "beside: between these",
        *other,
        *(f"{source.title}: {source.url} ({source.place})" for source in sources),
        *(f"{source.name}: {source.note}" for source in sources if source.note),
        *(f"{one.figure.id}: {one.figure.note}" for one in judged if one.figure.note),
    )
    verdicts: dict[str, int] = {str(name): count for name, count in counts.items()}
    about = {"kind": "reproduced", "figures": len(judged), **verdicts}
    return Page(about, (), (Sheet("rows", "", columns, rows),), notes, headline=Headline((said,)))


def _interval(values: dict[str, Any]) -> str:
    if values["low"] is None:
        return ""
    return f"{values['low']:.3f} to {values['high']:.3f}"
