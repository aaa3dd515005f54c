"""`attn-exp explain`: one page about a job."""

from pathlib import Path

from attn_exp.commands.options import FOLDER, URI, Arguments, Command, Positional
from attn_exp.core.live_line import LiveLine


def run(given: Arguments) -> int:
    """Print the page; return the exit code."""
    with LiveLine() as line:
        line.show(f"reading {given.words[0]}")
        from attn_exp.explain.find import find
        from attn_exp.explain.page import job_page, sweep_page

        target = find(given.words[0], Path(given.get("folder", "multirun")), given.get("uri"))
        page = sweep_page(target) if target.job is None else job_page(target.job, target.results)
    # Names and reasons may come from anywhere: they must not steer a terminal.
    print("".join(letter if letter.isprintable() or letter == "\n" else " " for letter in page), flush=True)
    return 0


COMMAND = Command(
    name="explain",
    usage="JOB_OR_SWEEP [uri=URI] [folder=FOLDER]",
    about=(
        "Prints one page about a job: what ran, how long each kernel took, what bounds it, and how it differs from the "
        "fastest backend's job on the same case. For a sweep of several jobs: which backends ran the same kernel."
    ),
    examples=(
        ("attn-exp explain first", "a sweep, by its name"),
        ("attn-exp explain first/flash-8383c16af6", "a job in it; how its name begins is enough"),
        ("attn-exp explain multirun/first/flash-8383c16af6", "a job's folder"),
        ("attn-exp explain 0123456789abcdef0123456789abcdef", "an MLflow run"),
    ),
    positional=Positional(
        name="JOB_OR_SWEEP",
        help="a sweep's name, SWEEP/JOB, a job's folder, or the identifier of an MLflow run",
        least=1,
        most=1,
        example="attn-exp explain SWEEP/JOB",
    ),
    options=(URI, FOLDER),
    exits=("0 the page was printed", "2 invalid command line"),
    run=run,
)
main = COMMAND.main
