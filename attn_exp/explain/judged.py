"""The judgement: calls and inputs, rows, the source, and each pass's bits."""

from collections.abc import Sequence

from attn_exp.core.record.checked import Judged, told
from attn_exp.core.record.record import Record
from attn_exp.core.source import commit, short
from attn_exp.core.text import SHORT, figures


def judged_lines(record: Record) -> list[str]:
    """Return what is known about how a job was judged; nothing of records from before that was kept."""
    if not record.judged:
        return []
    lines = [_calls(record.judged), _looked_at(record.judged), _source(record), *_bits(record)]
    return [line for line in lines if line]


def _calls(judged: Sequence[Judged]) -> str:
    """`first on normal(0, 1); hard on hard values; timed fwd (block 3) on normal(0, 1), signs changed`."""
    by_inputs: dict[str, list[str]] = {}
    for one in judged:
        by_inputs.setdefault(one.inputs, []).append(_call(one))
    several = [f"{', '.join(calls)} on {inputs}" for inputs, calls in by_inputs.items()]
    return f"calls: {'; '.join(several)}"


def _call(one: Judged) -> str:
    if one.index is None:
        odd = ["a later forward overwrites the output"] if one.overwritten else []
        odd += ["its backward refuses a gradient in another layout"] if one.strides_refused else []
        odd += ["its backward is wrong for gradients in two layouts in turn"] if one.strides_kept else []
        odd += ["it hides a NaN of the inputs"] if one.hides_nan else []
        return f"{one.call} ({', '.join(odd)})" if odd else one.call
    passes = "+".join(SHORT.get(name, name) for name in one.passes)
    return f"{one.call} {passes} (block {one.index:,})"


def _looked_at(judged: Sequence[Judged]) -> str:
    """How much of the results was compared at least."""
    least = min(judged, key=lambda one: one.rows / one.rows_of if one.rows_of else 1.0)
    rows = f"all {least.rows_of:,} rows" if least.rows == least.rows_of else f"{least.rows:,} of {least.rows_of:,} rows"
    heads = f" in {least.heads:,} heads" if least.heads else ""
    scores = [one.largest_score for one in judged if one.largest_score is not None]
    score = f", scores up to {figures(max(scores))}" if scores else ""
    return f"of each: {rows}{heads}{score}"


def _bits(record: Record) -> list[str]:
    """A line for each pass: `same bits, fwd: over calls yes (99 compared); over batch sizes no (...)`."""
    return [f"same bits, {SHORT[name]}: {told(measured.bitwise)}" for name, measured in record.passes.items()
            if measured.bitwise]  # fmt: skip


def _source(record: Record) -> str:
    facts = record.request.source
    if not facts:
        own = str(record.environment.get("git_commit") or "")
        return f"source: attn_exp's own{f', commit {own}' if own else ''}"
    files = f"{facts.get('module', '?')}, {facts.get('files', '?')} file{'s' * (facts.get('files') != '1')}"
    parts = [f"{short(facts)} ({files})", facts.get("package", ""), f"commit {commit(facts)}" if commit(facts) else ""]
    return f"source: {', '.join(filter(None, parts))}"
