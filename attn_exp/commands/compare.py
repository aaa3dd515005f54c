"""python -m attn_exp.compare sweep=NAME [against=NAME | history | published=FILE.csv] [KEY=VALUE ...]

Reads the records of sweeps and says which backend is faster where, by how much, and what cannot be told.

  python -m attn_exp.compare sweep=first baseline=flash                  the backends of a sweep beside each other
  python -m attn_exp.compare sweep=new against=old --fail-if-slower 3%   a sweep against an earlier one
  python -m attn_exp.compare sweep=monday,tuesday,friday history         three or more: where a level changed
  python -m attn_exp.compare sweep=first published=figures.csv           beside published figures

sweep, against   names of folders in folder= (multirun), patterns, paths; several with commas
where            which cells: where="causal and seq_len >= 4096 and backend in (flash, cudnn)"
metric           time_us, tflops, kernel_time_us, peak_memory_bytes ...; forward/time_us for one pass
baseline         the backend that gains are over; without it each stands beside the best
by, sort         group the means by fields; sort the rows by a field, -field from the largest down
format, out      table, markdown, csv, json, latex, html; a file, whose ending may say the format
plots            a folder for pictures of it, as SVG and PNG; html has them inside
rows             how many rows to show
margin           the difference that the verdict `equivalent` rules out (3%)
spread           what equal rows may differ by, instead of what is known of the device
--fail-if-slower exit with 1 if a cell is slower by so much, or lost
anyway           true: compare what cannot be compared all the same
uri              read from an MLflow store, uri=sqlite:///mlruns/mlflow.db; mlflow_experiment: which of its experiments

Exit codes: 0; 1 a regression; 2 something to type differently; 3 files that are no records were skipped.
"""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.core.errors import UserError

if TYPE_CHECKING:
    from attn_exp.compare.comparison import Comparison
    from attn_exp.compare.sheet import Picture

NOTHING_TO_DRAW = "there is nothing to draw of that"
REGRESSION, MISTAKE, SKIPPED = 1, 2, 3


def main(arguments: Sequence[str]) -> int:
    """Compare, and print or write what was found; the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else MISTAKE
    # Thousands of records are millions of objects without a cycle: looking for some takes a sixth of the time.
    gc.disable()
    from attn_exp.compare.answer import answer
    from attn_exp.compare.changes import Changes
    from attn_exp.compare.choice import choice_of
    from attn_exp.compare.pages import page
    from attn_exp.compare.render import format_of, text_of

    try:
        choice = choice_of(arguments)
        found = answer(choice)
        colour = choice.out is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        drawn = drawings(found) if format_of(choice.format, choice.out) == "html" else ()
        text = text_of(page(found), choice.format, choice.out, colour=colour, limit=choice.rows, pictures=drawn)
        if choice.out is None:
            print(text, flush=True)
        else:
            _write(Path(choice.out), text)
            print(f"{choice.out} is written", file=sys.stderr)
        if choice.plots is not None:
            from attn_exp.plots.all import write_charts

            count = len(write_charts(found, Path(choice.plots)))
            print(f"{count} plots are in {choice.plots}" if count else NOTHING_TO_DRAW, file=sys.stderr)
    except UserError as error:
        print(f"attn_exp.compare: {error}", file=sys.stderr)
        return MISTAKE
    for sentence in found.broken:
        print(f"skipped: {sentence}", file=sys.stderr)
    if isinstance(found, Changes) and choice.fail_if_slower is not None:
        regressions = found.regressions(choice.fail_if_slower)
        if regressions:
            lost = sum(row.verdict == "lost" for row in regressions)
            slower = len(regressions) - lost
            print(
                f"{slower} cells are slower by {100 * choice.fail_if_slower:g} % or more, {lost} are lost",
                file=sys.stderr,
            )
            return REGRESSION
    return SKIPPED if found.broken else 0


def drawings(found: "Comparison") -> "list[Picture]":
    """The pictures of a report; none, and a sentence on standard error, where there is nothing to draw with."""
    from attn_exp.plots.all import pictures

    try:
        return pictures(found)
    except UserError as error:
        print(f"the report is without plots: {error}", file=sys.stderr)
        return []


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another with out=FILE") from error
