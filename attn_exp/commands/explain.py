"""python -m attn_exp.explain JOB_OR_SWEEP [plots=FOLDER] [uri=URI] [folder=FOLDER]

One page about a job: what ran, how long each kernel, what bounds it, and how it differs from the fastest backend's job
on the same case. Of a sweep with several jobs: which backends ran the same kernel.

  python -m attn_exp.explain first                    a sweep, by its name
  python -m attn_exp.explain first/flash-8383c16af6   a job in it; the beginning of its name will do
  python -m attn_exp.explain multirun/first/flash-8383c16af6    a job's folder
  python -m attn_exp.explain 0123456789abcdef0123456789abcdef   an MLflow run
  python -m attn_exp.explain first/flash plots=pictures         its roofline too, as SVG and PNG

plots    a folder for the roofline, with the jobs on the same case beside it
uri      the MLflow store of a run: uri=sqlite:///mlruns/mlflow.db, or a server's: uri=http://127.0.0.1:5000
folder   where sweeps lie: folder=multirun

Exit codes: 0; 2 something to type differently.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from attn_exp.core.errors import UserError, nearest

MISTAKE = 2
_KEYS = ("plots", "uri", "folder")


def main(arguments: Sequence[str]) -> int:
    """Print the page; the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else MISTAKE
    from attn_exp.explain.find import find
    from attn_exp.explain.page import job_page, sweep_page

    try:
        word, options = _split(arguments)
        found = find(word, Path(options.get("folder", "multirun")), options.get("uri"))
        page = sweep_page(found) if found.job is None else job_page(found.job, found.results)
        # Names and reasons may come from anywhere: they must not steer a terminal.
        print("".join(letter if letter.isprintable() or letter == "\n" else " " for letter in page), flush=True)
        if "plots" in options:
            from attn_exp.explain.page import write_picture

            written = write_picture(found, Path(options["plots"]))
            print("\n" + ("; ".join(map(str, written)) if written else "there is no rate to draw a roofline of"))
    except UserError as error:
        print(f"attn_exp.explain: {error}", file=sys.stderr)
        return MISTAKE
    return 0


def _split(arguments: Sequence[str]) -> tuple[str, dict[str, str]]:
    words = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    given = [argument.partition("=") for argument in arguments if argument not in words]
    for key, sign, value in given:
        if key not in _KEYS or not sign:
            near = nearest(key, _KEYS)
            raise UserError(f"there is no option '{key}{sign}': {near}they are {', '.join(f'{k}=' for k in _KEYS)}")
        if not value:
            raise UserError(f"{key}= is empty: write {key}=SOMETHING")
    if len(words) != 1:
        what = f"{len(words)} were given" if words else "none was given"
        raise UserError(f"a page is about one job or sweep, and {what}: python -m attn_exp.explain SWEEP/JOB")
    return words[0], {key: value for key, _, value in given}
