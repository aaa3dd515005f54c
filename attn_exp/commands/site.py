"""`attn-exp site`: a static site of the histories of all sweeps in a folder."""

import sys
from collections.abc import Mapping
from pathlib import Path

from attn_exp.commands.options import Arguments, Command, Option, Positional
from attn_exp.core.errors import UserError
from attn_exp.core.ticker import Ticker
from attn_exp.core.values import share, text
from attn_exp.results.there import HOME

SKIPPED = 3


def run(given: Arguments) -> int:
    """Write the site; return the exit code."""
    folder = Path(given.words[0] if given.words else HOME)
    out = Path(given.get("out", "history"))
    with Ticker() as ticker:
        ticker.stage(f"reading the sweeps in {folder}")
        from attn_exp.compare.answer import history_of
        from attn_exp.compare.choice import Choice
        from attn_exp.compare.site import site_of
        from attn_exp.results.read import read_home

        choice = Choice(
            metric=given.get("metric", "time_us"), where=given.get("where"), spread=given.get("spread"), history=True
        )
        history = history_of(choice, read_home(folder))
        ticker.stage("drawing the histories")
        files = site_of(history, folder.resolve().name)
        _write(out, files)
    turned = sum(bool(row.turns) for row in history.rows)
    sweeps = "1 sweep" if len(history.sweeps) == 1 else f"{len(history.sweeps)} sweeps"
    print(f"{out / 'index.html'} is written: {sweeps}, {len(history.rows)} cells, {turned} changed level")
    for sentence in history.broken:
        print(f"skipped: {sentence}", file=sys.stderr)
    return SKIPPED if history.broken else 0


def _write(out: Path, files: Mapping[str, str]) -> None:
    """Write the files, the first page last, and remove pages of cases that are no more."""
    from attn_exp.compare.site import CASE_PAGE
    from attn_exp.core.files import write_whole

    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(out / name, f"{content}\n".encode(), lasting=False)
        for path in out.iterdir():
            if CASE_PAGE.fullmatch(path.name) and path.name not in files:
                path.unlink()
    except OSError as error:
        raise UserError(f"cannot write into {out} ({error.strerror}): choose another folder with out=FOLDER") from error


COMMAND = Command(
    name="site",
    usage="[FOLDER] [out=FOLDER] [OPTION=VALUE ...]",
    about=(
        "Writes a static site of the histories of all sweeps in a folder: HTML files that need no server and no "
        "network. Each case has a page with a chart of each pass; changes of level are marked where a test over the "
        "sweeps finds them, and changes of GPU, driver and packages are drawn as lines. Duels are left out."
    ),
    examples=(
        ("attn-exp site", "the sweeps in multirun/, into history/index.html"),
        ("attn-exp site /data/nightly out=public metric=tflops", "other folders, and rates"),
    ),
    positional=Positional(
        name="FOLDER", help=f"the folder that the sweeps are in; {HOME} without it", most=1, example="attn-exp site"
    ),
    options=(
        Option(name="out", value="FOLDER", read=text, default="history", complete="files",
               help="the folder to write into"),
        Option(name="metric", value="NAME", read=text, default="time_us", help="what is drawn, as for compare"),
        Option(name="where", value="EXPRESSION", read=text, help="which cells, as for compare: where='causal'"),
        Option(name="spread", value="PERCENT", read=share, default="the doctor's margin for the device",
               help="the smallest change of level that counts"),
    ),
    exits=("0 written", "2 invalid command line", "3 written, but some files are not valid records and were skipped"),
    run=run,
)  # fmt: skip
main = COMMAND.main
