"""`attn-exp compare`: which backend is faster where, by how much, and which differences are too small to tell."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.commands.options import Command
from attn_exp.comparison.choice import Choice
from attn_exp.core.errors import UserError
from attn_exp.core.live_line import LiveLine
from attn_exp.core.redaction import redacted
from attn_exp.core.text import WIDTH, colours, terminal_width
from attn_exp.results.there import HOME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attn_exp.comparison.changes import Changes
    from attn_exp.comparison.comparison import Comparison
    from attn_exp.comparison.rivals import Rivals
    from attn_exp.core.sheet.sheet import Picture
    from attn_exp.results.read import Sweep

NOTHING_TO_DRAW = "this comparison has nothing to draw"
REGRESSION, SKIPPED, UNSETTLED = 1, 3, 4


def run(choice: Choice) -> int:
    """Compare, and print or write the result; return the exit code."""
    with LiveLine() as line:
        line.show(f"reading {', '.join((*choice.against, *choice.sweep))} and comparing")
        from attn_exp.comparison.answer import compare_read, read_against, read_sweeps
        from attn_exp.comparison.changes import Changes
        from attn_exp.comparison.rivals import Rivals

        sweeps = read_sweeps(choice, choice.sweep)
        comparison = compare_read(choice, sweeps, read_against(choice, sweeps))
        saved = _save(choice, sweeps)
        line.show("writing the report" if choice.out else "laying the tables out")
        made_by = redacted(shlex.join(("attn-exp", "compare", *choice.command)))
        text = _text(comparison, choice.format, choice.out, choice.rows, made_by)
    if choice.out is None:
        print(text, flush=True)
    else:
        _write(Path(choice.out), text)
        print(f"{choice.out} is written", file=sys.stderr)
    if saved:
        print(saved, file=sys.stderr)
    if choice.plots is not None:
        from attn_exp.plots.all import write_charts

        count = len(write_charts(comparison, choice.plots))
        print(f"{count} plots are in {choice.plots}" if count else NOTHING_TO_DRAW, file=sys.stderr)
    for sentence in comparison.broken:
        print(f"skipped: {sentence}", file=sys.stderr)
    gate = choice.fail_if_slower
    if isinstance(comparison, Changes) and gate is not None and fails(comparison, gate, choice.undecided):
        return REGRESSION
    if isinstance(comparison, Rivals) and choice.settle:
        return _settle(comparison) or (SKIPPED if comparison.broken else 0)
    return SKIPPED if comparison.broken else 0


def fails(changes: "Changes", threshold: float, undecided: str) -> bool:
    """Return whether a gate fails, and say why on standard error."""
    percent = f"{100 * threshold:g} %"
    regressions = changes.regressions(threshold)
    if regressions:
        lost = sum(row.verdict == "lost" for row in regressions)
        print(f"slower by {percent} or more: {len(regressions) - lost} cells; lost: {lost}", file=sys.stderr)
    open_ = len(changes.undecided(threshold))
    if open_ and undecided != "pass":
        verdict = "FAILED" if undecided == "fail" else "WARNING"
        print(f"{verdict}: may be slower by {percent} or more: {open_} of {len(changes.rows)} cells", file=sys.stderr)
    return bool(regressions) or (bool(open_) and undecided == "fail")


def _save(choice: Choice, sweeps: "Sequence[Sweep]") -> str:
    """Keep a sweep as a baseline if that was asked for; return the sentence about it, else an empty one."""
    if choice.save is None:
        return ""
    if len(sweeps) != 1:
        raise UserError(f"save={choice.save} keeps one sweep, and {len(sweeps)} were given: name one")
    from attn_exp.results.baselines import keep_baseline
    from attn_exp.results.read import counted_of

    (sweep,) = sweeps
    path = keep_baseline(sweep, choice.save, choice.folder, replace=choice.replace)
    kept = counted_of(len(sweep.results), sweep.planned, "record")
    return f"{path} keeps {kept} of {sweep.name}: attn-exp compare SWEEP against={choice.save} compares with it"


def _settle(rivals: "Rivals") -> int:
    """Run the duels that a comparison proposes; return the exit code, which is not that of a regression."""
    from attn_exp.commands.duel import COMMAND as DUEL
    from attn_exp.commands.duel import run_many
    from attn_exp.comparison.rivals import comparing

    commands = dict.fromkeys(duel.command for duel in rivals.ties)
    for command in commands:
        if command.startswith("#"):
            print(f"no duel: {command.lstrip('# ')}", file=sys.stderr)
    beside = _beside(Path(rivals.sweeps[0].place))
    duels = [[*shlex.split(command)[2:], *beside] for command in commands if not command.startswith("#")]
    if not duels:
        unlike = f"a duel does not compare {rivals.metric}"
        why = "nothing is too close to call" if rivals.metric.settled_by_duels else unlike
        print(f"{why}: there is no duel to run", file=sys.stderr)
        return 0
    count = "1 duel" if len(duels) == 1 else f"{len(duels)} duels"
    said = f"settle=true measures now: {count} for {rivals.answer.ties} ties"
    print(f"{said}; Ctrl-C ends it, and keeps what is measured", file=sys.stderr, flush=True)
    code = UNSETTLED if run_many(duels, DUEL.main) else 0
    if again := comparing(rivals.sweeps):
        print(f"the answer with what the duels decided: {again}", file=sys.stderr)
    return code


def _beside(sweep: Path) -> list[str]:
    """Return the words that let a duel's folder lie beside a sweep's, where comparisons find it; none if it does."""
    home = sweep.resolve().parent
    # Hydra takes the other characters of a path between quotes.
    if not sweep.is_dir() or home == Path(HOME).resolve() or re.search(r"['\\\\$]", str(home)):
        return []
    return [f"folder='{home}/${{sweep}}'"]


def drawings(comparison: "Comparison") -> "list[Picture]":
    """Return the pictures of a report; none, and a sentence on standard error, where matplotlib is missing."""
    from attn_exp.plots.all import pictures

    try:
        return pictures(comparison)
    except UserError as error:
        print(f"the report is without plots: {error}", file=sys.stderr)
        return []


def write_report(comparison: "Comparison", path: Path) -> Path:
    """Write a comparison's report in the format that the file's ending names; return its path.

    Raises UserError if the file cannot be written.
    """
    _write(path, _text(comparison, None, str(path)))
    return path


def _text(
    comparison: "Comparison", form: str | None, out: str | None, limit: int | None = None, made_by: str = ""
) -> str:
    """Return a report for a file, or for standard output; it says which command made it."""
    from attn_exp.comparison.pages import page
    from attn_exp.core.sheet.render import format_of, text_of

    drawn = drawings(comparison) if format_of(form, out) == "html" else ()
    colour, width = (False, WIDTH) if out else (colours(sys.stdout), terminal_width(sys.stdout))
    shown = page(comparison)
    shown = replace(shown, made_by=(*shown.made_by, *filter(None, [made_by])))
    return text_of(shown, form, out, colour=colour, limit=limit, pictures=drawn, width=width)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another with out=FILE") from error


COMMAND = Command(
    name="compare",
    usage="SWEEP [SWEEP ...] [against=SWEEP | history=true] [OPTION=VALUE ...]",
    options=Choice,
    run=run,
    examples=(
        ("attn-exp compare first baseline=flash", "the backends compared with each other"),
        ("attn-exp compare new against=old fail_if_slower=3%", "against an earlier sweep"),
        ("attn-exp compare first save=main", "keep a baseline; later against=main"),
        ("attn-exp compare monday,tuesday,friday history=true", "where a level changed"),
        ("attn-exp compare first settle=true", "and run the duels of what is too close to call"),
        ("attn-exp compare first out=report.html plots=pictures", "a report, and pictures"),
    ),
    exits=(
        "0 no regression",
        "1 fail_if_slower= found a regression, or undecided=fail what may be one",
        "2 invalid command line",
        "3 some files are not valid records and were skipped",
        "4 settle=true could not measure each duel",
    ),
)
main = COMMAND.main
