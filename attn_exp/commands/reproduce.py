"""`attn-exp reproduce`: repeats published figures, or a sweep of another host, and says which hold."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attn_exp.commands.options import Command
from attn_exp.config.overrides import override_key
from attn_exp.core.errors import UserError
from attn_exp.core.options import Options, config_dir_option, option
from attn_exp.core.sheet import FORMATS
from attn_exp.core.text import colours, terminal_width
from attn_exp.core.values import one_of, rows
from attn_exp.results.there import HOME

if TYPE_CHECKING:
    from attn_exp.core.sheet.sheet import Page
    from attn_exp.reproduce.judged import Measured
    from attn_exp.results.read import Sweep


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(Options):
    """Repeats figures that papers, vendors and issues published, or a sweep of another host.

    It measures their exact configurations, or takes records that exist, and prints figure, ours, the ratio with its
    interval, and a verdict. Without a name it lists the sources.
    """

    name: str | None = option(
        "a source, a figure as SOURCE/ID, or a sweep: its name, folder or archive of records",
        "NAME",
        example="attn-exp reproduce cudnn_frontend_h200",
    )
    rows: int | None = option("how many of a sweep's jobs to measure again, or all", "ROWS", default="20", read=rows)
    where: str | None = option(
        'which figures: where="causal and library=FA3 and status=not_run", in the language of compare; the fields are '
        "those of a case, and source, id, library, backend, gpu, pass, status, deterministic",
        "EXPRESSION",
    )
    sweep: tuple[str, ...] = option(
        "judge by sweeps that exist (names, folders, archives, or a table.csv), and measure nothing",
        "SWEEP",
        default=(),
    )
    dry_run: bool = option("print the runs that are needed, and measure nothing")
    published: Path | None = option("a folder of files of figures of your own", "FOLDER", shown="the package's own")
    format: str | None = option(", ".join(FORMATS), "FORMAT", shown="table", read=one_of(FORMATS))
    folder: Path | None = option("the folder that sweeps are in", "FOLDER", shown=HOME)
    config_dir: Path | None = config_dir_option()


def run(options: ReproduceOptions) -> int:
    """Do what the arguments ask for: list, or repeat figures; return the exit code."""
    from attn_exp.reproduce import page
    from attn_exp.reproduce.confirmed import is_sweep
    from attn_exp.reproduce.figures import choose, read_published, runs
    from attn_exp.reproduce.judged import judge

    name, form = options.name, options.format
    home = options.folder or Path(HOME)
    figures = read_published(options.published)
    if name and is_sweep(name, home) and name not in {figure.source.name for figure in figures}:
        return _again(name, home, options)
    chosen = choose(figures, name) if name else figures
    if options.where:
        chosen = page.filtered(chosen, options.where)
    if not name:
        _print(page.sources_page(chosen), form)
        return 0
    if options.sweep:
        measured = [one for word in options.sweep for one in _measured(word, home)]
        _print(page.judged_page(judge(chosen, measured)), form)
        return 0
    sweep = re.sub(r"[^A-Za-z0-9._-]", "-", f"reproduce-{name}")
    flags = ["--config-dir", str(options.config_dir)] if options.config_dir else []
    more = [*options.overrides, *([f"folder={home}/${{sweep}}"] if options.folder else [])]
    needed = runs(chosen, more, sweep)
    if options.dry_run:
        print("\n".join(shlex.join(["attn-exp", "run", *arguments]) for arguments in needed))
        return 0
    measured = _run(needed, flags, sweep, home)
    _print(page.judged_page(judge(chosen, measured)), form)
    return 0


def _again(name: str, home: Path, options: ReproduceOptions) -> int:
    """Measure rows of a sweep again, or take those of `sweep=`, and print how the two compare; return the exit code."""
    from attn_exp.commands.run import run_records
    from attn_exp.reproduce.confirmed import confirm, confirmed_page, records_of, sample
    from attn_exp.sweep.task_function import OF_A_JOB

    if options.where or options.published:
        raise UserError("where= and published= are of published figures: leave them out for a sweep")
    keys = {re.split(r"[.@/]", override_key(word))[0] for word in options.overrides}
    if theirs := sorted(keys & {*OF_A_JOB, "backend", "timer", "mask", "score", "cache", "experiment"}):
        raise UserError(f"{theirs[0]}= is what the sweep's records say: leave it out")
    with records_of(name, home) as there:
        chosen = sample(there.results, None if options.sweep else options.rows)
        measured = options.sweep
        if not measured:
            sweep = re.sub(r"[^A-Za-z0-9._-]", "-", f"reproduce-{Path(name).resolve().name.partition('.tar')[0]}")
            measured = (str(home / sweep),)
            words = [*options.overrides, f"sweep={sweep}", f"folder={home / sweep}"]
            words += ["dry_run=true"] if options.dry_run else []
            flags = ["--config-dir", str(options.config_dir)] if options.config_dir else []
            command = ["reproduce", name, f"rows={options.rows or 'all'}", *options.overrides, *flags]
            command += [f"folder={home}"] if options.folder else []
            code = run_records([one.record() for one in chosen], [*flags, *words], command)
            if code or options.dry_run:
                return code
        with _sweeps(measured, home) as here:
            rows = confirm(chosen, [result for sweep in here for result in sweep.results])
            _print(confirmed_page(rows, [text for sweep in (there, *here) for text in sweep.broken]), options.format)
    return 0


@contextmanager
def _sweeps(words: Sequence[str], home: Path) -> "Iterator[list[Sweep]]":
    """Yield the sweeps that `sweep=` names, in folders and in archives."""
    from attn_exp.reproduce.confirmed import records_of
    from attn_exp.results.read import read_folder, sweep_folders

    with ExitStack() as opened:
        archives = [word for word in words if Path(word).is_file()]
        folders = [word for word in words if word not in archives]
        yield [
            *(opened.enter_context(records_of(word, home)) for word in archives),
            *map(read_folder, sweep_folders(folders, home) if folders else ()),
        ]


def _run(needed: Sequence[Sequence[str]], flags: Sequence[str], sweep: str, home: Path) -> "list[Measured]":
    """Run what is needed and return what was measured. Raises UserError if nothing could be."""
    from attn_exp.commands.run import main

    if not needed:
        return []
    for index, arguments in enumerate(needed):
        print(f"[{index + 1}/{len(needed)}] attn-exp run {' '.join(arguments)}", file=sys.stderr, flush=True)
        code = main([*flags, *arguments])
        if code not in (0, 1):
            raise UserError(f"the run ended with exit code {code}; what is measured is kept in {home / sweep}")
    return _measured(sweep, home)


def _measured(word: str, home: Path) -> "list[Measured]":
    """Return what a sweep measured, or the table of one."""
    from attn_exp.reproduce.judged import from_results, from_table

    if word.endswith(".csv"):
        return from_table(Path(word))
    with _sweeps([word], home) as sweeps:
        return [one for sweep in sweeps for one in from_results(sweep.results)]


def _print(page: "Page", form: str | None) -> None:
    from attn_exp.core.sheet.render import text_of

    print(text_of(page, form, colour=colours(sys.stdout), width=terminal_width(sys.stdout)), flush=True)


COMMAND = Command(
    name="reproduce",
    usage="[NAME] [where=EXPRESSION] [sweep=SWEEP] [dry_run=true] [KEY=VALUE ...]",
    options=ReproduceOptions,
    run=run,
    examples=(
        ("attn-exp reproduce", "the sources, and how their figures stand"),
        ("attn-exp reproduce cudnn_frontend_h200 dry_run=true", "the runs that are needed"),
        ('attn-exp reproduce cudnn_frontend_h200 where="dtype=bf16 and seq_len >= 8192"', "measure a part"),
        (
            "attn-exp reproduce cudnn_frontend_h200 sweep=results/h200/reproduce/cudnn_frontend_h200.tar.xz",
            "from kept records",
        ),
        ("attn-exp reproduce results/h200/serving/serving.tar.xz rows=20", "jobs of a sweep, measured here again"),
    ),
    overrides=(("KEY=VALUE", "more overrides for the runs: device=cuda:1, stopping.budget_s=2, tracker=none"),),
    exits=("0 done", "2 invalid command line"),
)
main = COMMAND.main
