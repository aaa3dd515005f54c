"""`attn-exp explain`: one page about a job."""

from dataclasses import dataclass
from pathlib import Path

from attn_exp.commands.options import Command
from attn_exp.core.live_line import LiveLine
from attn_exp.core.options import Options, folder_option, option, uri_option


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Options):
    """Prints one page about a job.

    It says what ran, how long each kernel took, what bounds it, and how it differs from the fastest backend's job on
    the same case. For a sweep of several jobs: which backends ran the same kernel.
    """

    target: str = option(
        "a sweep's name, SWEEP/JOB, a job's folder, or the identifier of an MLflow run",
        "JOB_OR_SWEEP", example="attn-exp explain SWEEP/JOB",
    )  # fmt: skip
    uri: str | None = uri_option()
    folder: Path = folder_option()


def run(options: ExplainOptions) -> int:
    """Print the page; return the exit code."""
    with LiveLine() as line:
        line.show(f"reading {options.target}")
        from attn_exp.explain.find import find
        from attn_exp.explain.page import job_page, sweep_page

        sweep, job = find(options.target, options.folder, options.uri)
        page = sweep_page(sweep) if job is None else job_page(job, sweep.results)
    # Names and reasons may come from anywhere: they must not steer a terminal.
    print("".join(letter if letter.isprintable() or letter == "\n" else " " for letter in page), flush=True)
    return 0


COMMAND = Command(
    name="explain",
    usage="JOB_OR_SWEEP [uri=URI] [folder=FOLDER]",
    options=ExplainOptions,
    run=run,
    examples=(
        ("attn-exp explain first", "a sweep, by its name"),
        ("attn-exp explain first/flash-8383c16af6", "a job in it; how its name begins is enough"),
        ("attn-exp explain multirun/first/flash-8383c16af6", "a job's folder"),
        ("attn-exp explain 0123456789abcdef0123456789abcdef", "an MLflow run"),
    ),
    exits=("0 the page was printed", "2 invalid command line"),
)
main = COMMAND.main
