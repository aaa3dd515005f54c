"""`attn-exp pick`: writes a dispatch table, the fastest backend at each shape of sweeps."""

import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attn_exp.commands.options import Command
from attn_exp.core.errors import UserError
from attn_exp.core.live_line import LiveLine
from attn_exp.core.options import Options, folder_option, option, sweeps_option
from attn_exp.core.redaction import redacted
from attn_exp.core.text import and_text

if TYPE_CHECKING:
    from attn_exp.core.dispatch_table import Bucket, DispatchTable

SKIPPED = 3
# The file that is written by default for each target.
TARGETS = {"sdpa": "table.json", "json": "picks.json"}


@dataclass(frozen=True, kw_only=True)
class PickOptions(Options):
    """Writes a dispatch table; nothing is measured.

    It has at each measured shape the fastest backend that a model can call, its lead with the interval, and the hashes
    of the records behind it. In a program, attn_exp.dispatch.load(FILE) calls what the table picks.
    """

    sweep: tuple[str, ...] = sweeps_option(example="attn-exp pick first")
    target: Literal["sdpa", "json"] = option(
        "sdpa: a table for attn_exp.dispatch.load; json: all measured cases and backends, for other programs",
        "TARGET", default="sdpa",
    )  # fmt: skip
    out: Path | None = option("the file to write", "FILE", shown=" or ".join(TARGETS.values()))
    backends: tuple[str, ...] = option(
        "the backends that may be picked", "NAME,...", default=(), shown="all that a model can call"
    )
    where: str | None = option("which rows: where='causal and seq_len >= 4096'", "EXPRESSION")
    folder: Path = folder_option()


def run(options: PickOptions) -> int:
    """Write the table and print what is in it; return the exit code."""
    from attn_exp.comparison.picks import pick
    from attn_exp.core.dispatch_table import write_export, write_table
    from attn_exp.results.read import read_folder, sweep_folders

    target = options.target
    out = options.out or Path(TARGETS[target])
    if out.is_dir():
        raise UserError(f"out={out} is a folder: write a file, out={out / TARGETS[target]}")
    with LiveLine() as line:
        line.show(f"reading {', '.join(options.sweep)}")
        sweeps = [read_folder(folder) for folder in sweep_folders(options.sweep, options.folder)]
        made_by = redacted(shlex.join(("attn-exp", "pick", *options.command)))
        every = target == "json"
        picked = pick(sweeps, backends=options.backends, where=options.where, made_by=made_by, every=every)
        lines = summary(picked.table)
        (write_export if target == "json" else write_table)(picked.table, out)
    print("\n".join(lines))
    for note in picked.notes:
        print(note, file=sys.stderr)
    uses = "" if target == "json" else f": attn_exp.dispatch.load({str(out)!r}) uses it"
    print(f"{out} is written{uses}", file=sys.stderr)
    broken = [sentence for sweep in sweeps for sentence in sweep.broken]
    for sentence in broken:
        print(f"skipped: {sentence}", file=sys.stderr)
    return SKIPPED if broken else 0


def summary(table: "DispatchTable") -> list[str]:
    """Return for each mode what is picked in how many shapes."""
    from attn_exp.core.dispatch_table import MODES

    facts = table.fingerprint
    lines = [f"dispatch table for {facts.get('gpu') or facts.get('cpu')}, torch {facts['torch']}"]
    for mode in MODES:
        own = [bucket for bucket in table.buckets if bucket.mode == mode]
        if not own:
            continue
        lines.append(f"{mode}, {len(own)} shape{'' if len(own) == 1 else 's'}: {_picks(own)}")
    return lines


def _picks(buckets: "list[Bucket]") -> str:
    sole = Counter(bucket.pick for bucket in buckets if not bucket.undecided)
    ties = Counter(and_text(bucket.undecided) for bucket in buckets if bucket.undecided)
    parts = [f"{label} in {count}" for label, count in sole.most_common()]
    return ", ".join([*parts, *(f"{labels} tie in {count}" for labels, count in ties.most_common())])


COMMAND = Command(
    name="pick",
    usage="SWEEP [SWEEP ...] [out=FILE] [OPTION=VALUE ...]",
    options=PickOptions,
    run=run,
    examples=(
        ("attn-exp pick first out=table.json", "all that the sweep measured"),
        ("attn-exp pick first,second out=table.json backends=flash,cudnn", "of two sweeps, and of two backends"),
        ("attn-exp pick first target=json", "for an engine: paged caches, packed requests and all backends as well"),
        ("attn-exp pick first where='head_dim == 128'", "some of its shapes, into table.json"),
    ),
    exits=(
        "0 the table is written",
        "2 invalid command line, or nothing to pick from",
        "3 some files are not valid records and were skipped",
    ),
)
main = COMMAND.main
