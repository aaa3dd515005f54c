"""`attn-exp compare`: which backend is faster where, by how much, and which differences are too small to tell."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_exp.commands.options import FOLDER, MLFLOW_EXPERIMENT, URI, Arguments, Command, Option, Positional
from attn_exp.comparison import MARGIN, SHOWN, UNDECIDED
from attn_exp.core.errors import UserError
from attn_exp.core.live_line import LiveLine
from attn_exp.core.redaction import redacted
from attn_exp.core.sheet import FORMATS
from attn_exp.core.text import WIDTH, colours, terminal_width
from attn_exp.results.there import HOME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attn_exp.comparison.changes import Changes
    from attn_exp.comparison.choice import Choice
    from attn_exp.comparison.comparison import Comparison
    from attn_exp.comparison.rivals import Rivals
    from attn_exp.core.sheet.sheet import Picture
    from attn_exp.results.read import Sweep

NOTHING_TO_DRAW = "this comparison has nothing to draw"
REGRESSION, SKIPPED, UNSETTLED = 1, 3, 4


def run(given: Arguments) -> int:
    """Compare, and print or write the result; return the exit code."""
    choice = choice_of(given)
    with LiveLine() as line:
        line.show(f"reading {', '.join((*choice.against, *choice.sweep))} and comparing")
        from attn_exp.comparison.answer import compare_read, read_against, read_sweeps
        from attn_exp.comparison.changes import Changes
        from attn_exp.comparison.rivals import Rivals

        sweeps = read_sweeps(choice, choice.sweep)
        comparison = compare_read(choice, sweeps, read_against(choice, sweeps))
        saved = _save(choice, sweeps)
        line.show("writing the report" if choice.out else "laying the tables out")
        made_by = redacted(shlex.join(("attn-exp", "compare", *given.command)))
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

        count = len(write_charts(comparison, Path(choice.plots)))
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


def _save(choice: "Choice", sweeps: "Sequence[Sweep]") -> str:
    """Keep a sweep as a baseline if that was asked for; return the sentence about it, else an empty one."""
    if choice.save is None:
        return ""
    if len(sweeps) != 1:
        raise UserError(f"save={choice.save} keeps one sweep, and {len(sweeps)} were given: name one")
    from attn_exp.results.baselines import keep_baseline
    from attn_exp.results.read import counted_of

    (sweep,) = sweeps
    path = keep_baseline(sweep, choice.save, Path(choice.folder), replace=choice.replace)
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
        why = (
            "nothing is too close to call"
            if rivals.metric.settled_by_duels
            else f"a duel does not compare {rivals.metric}"
        )
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


def choice_of(given: Arguments) -> "Choice":
    """Return the comparison that was asked for. Raises UserError for options that contradict each other."""
    from attn_exp.comparison.choice import choice_for

    return choice_for(given.words, given.values)


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

    Raises:
        UserError: the file cannot be written.
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


def _read(key: str, value: str) -> Any:
    """Read an option's text. The readers are imported late, so that `--help` imports little."""
    from attn_exp.comparison.choice import READERS

    return READERS[key](key, value)


def _option(name: str, value: str, text: str, **more: str | tuple[str, ...]) -> Option:
    return Option(name=name, value=value, help=text, read=_read, **more)  # type: ignore[arg-type]


COMMAND = Command(
    name="compare",
    usage="SWEEP [SWEEP ...] [against=SWEEP | history=true] [OPTION=VALUE ...]",
    about=(
        "Reads the records of sweeps and says which backend is faster where, and by how much; nothing is measured. "
        "Differences that are too small to tell come with the command of the duel that would decide them."
    ),
    examples=(
        ("attn-exp compare first baseline=flash", "the backends compared with each other"),
        ("attn-exp compare new against=old fail_if_slower=3%", "against an earlier sweep"),
        ("attn-exp compare first save=main", "keep a baseline; later against=main"),
        ("attn-exp compare monday,tuesday,friday history=true", "where a level changed"),
        ("attn-exp compare first settle=true", "and run the duels of what is too close to call"),
        ("attn-exp compare first out=report.html plots=pictures", "a report, and pictures"),
    ),
    positional=Positional(
        name="SWEEP",
        help="a sweep's name in folder=, a pattern ('nightly-*') or a path; several with commas or spaces",
        least=1,
        commas=True,
        example="attn-exp compare first",
    ),
    options=(
        _option("against", "SWEEP", "the earlier sweep or baseline to compare with; last: the last that shares a case"),
        _option("history", "true", "three or more sweeps in order of time", default="false", choices=("true", "false")),
        _option("baseline", "BACKEND", "the backend that gains are relative to", default="the best of each case"),
        _option("where", "EXPRESSION", "which cells: where='causal and seq_len >= 4096 and backend in (flash, cudnn)'"),
        _option("by", "FIELD,...", "group the means by these fields"),
        _option("sort", "FIELD", "sort the rows by a field; -FIELD for the largest first"),
        _option("show", "UNIT", "what the table shows of a time: tflops, us or gb/s", default="auto", choices=SHOWN),
        _option("metric", "NAME", "time_us, tflops, kernel_time_us, ...; forward/time_us for one pass",
                default="time_us"),
        _option("format", "FORMAT", ", ".join(FORMATS), default="by the ending of out=, else table",
                choices=tuple(FORMATS)),
        _option("out", "FILE", "write the report into a file instead of printing it"),
        _option("plots", "FOLDER", "write the pictures into a folder, as SVG and PNG; HTML has them inside"),
        _option("rows", "N", "how many rows to show", default="all"),
        _option("margin", "PERCENT", "the difference that the verdict `equivalent` rules out",
                default=f"{100 * MARGIN:g}%"),
        _option("spread", "PERCENT", "what equal rows may differ by", default="the doctor's margin for the device"),
        _option("fail_if_slower", "PERCENT",
                "exit with 1 if a cell is slower by at least PERCENT, or has no result any more"),
        _option("undecided", "WHAT", "whether cells that may be slower by that much fail, warn or pass", default="warn",
                choices=UNDECIDED),
        _option("save", "NAME", "keep the sweep's records as a baseline of this name, in baselines/ beside folder="),
        _option("replace", "true", "begin the baseline of save= anew, without its earlier runs", default="false",
                choices=("true", "false")),
        _option("settle", "true", "run the duels that the comparison proposes, one after another", default="false",
                choices=("true", "false")),
        _option("anyway", "true", "compare sweeps of different devices or versions all the same", default="false",
                choices=("true", "false")),
        FOLDER,
        URI,
        MLFLOW_EXPERIMENT,
    ),
    exits=(
        "0 no regression",
        "1 fail_if_slower= found a regression, or undecided=fail what may be one",
        "2 invalid command line",
        "3 some files are not valid records and were skipped",
        "4 settle=true could not measure each duel",
    ),
    run=run,
    bare=("history", "anyway"),
)  # fmt: skip
main = COMMAND.main
