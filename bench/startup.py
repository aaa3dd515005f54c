"""python bench/startup.py [CHECKOUT ...] [--runs N] [--out FILE.json]: how long commands take that measure nothing.

Runs each command in a folder of its own: once to fill Python's caches, then N times (default 7). Prints the median of
the wall time with the shortest and the longest, the median processor time, and how many modules are imported. Several
checkouts (default: this one) take turns, run by run, so that a busy machine slows all of them down alike.
"""

import argparse
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tabulate import tabulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ONE = ("attn_exp", "device=cpu", "backend=flash", "dry_run=true")
MANY = (
    *("attn_exp", "-m", "device=cpu", "backend=flash,math", "causal=true,false", "batch=1,2,4,8"),
    *("seq_len=128,256,512,1024,2048,4096", "dry_run=true"),
)
COMPLETE = ("attn_exp", "-sc", "query=bash")


@dataclass(frozen=True)
class Command:
    """What `python -m` gets, the exit code that is right, and variables of its own."""

    words: tuple[str, ...]
    exit_code: int = 0
    variables: dict[str, str] = field(default_factory=dict)


COMMANDS = {
    "--help": Command(("attn_exp", "--help")),
    "--version": Command(("attn_exp", "--version")),
    "a typo in a value": Command(("attn_exp", "device=cpu", "backend=flush"), exit_code=2),
    "a typo in a key": Command(("attn_exp", "device=cpu", "bach=2"), exit_code=2),
    "dry_run of 1 job": Command(ONE),
    "dry_run of 96 jobs": Command(MANY),
    "completion of an option": Command(COMPLETE, variables={"COMP_LINE": "attn-exp backend=fl"}),
    "completion after a comma": Command(COMPLETE, variables={"COMP_LINE": "attn-exp -m backend=flash,cu"}),
    "completion of a key": Command(COMPLETE, variables={"COMP_LINE": "attn-exp ba"}),
    # In both of their spellings; a checkout that has only one of them says no to the other.
    **{
        f"{name} --help{spelling}": Command((*words, "--help"))
        for name in ("run", "duel", "compare", "explain", "doctor", "backends", "log", "ui")
        for spelling, words in (("", ("attn_exp", name)), (", as a module", (f"attn_exp.{name}",)))
        if (name, spelling) != ("run", ", as a module")
    },
}


@dataclass
class Timed:
    """What a command took in one checkout; no times if it does not have the command."""

    command: str
    exit_code: int
    modules: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def environment(checkout: Path, command: Command) -> dict[str, str]:
    """The variables of a run: the checkout's package, with Python's caches, which some machines turn off."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(checkout), "COLUMNS": "120"} | command.variables


def processor_seconds() -> float:
    """The processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_run(checkout: Path, command: Command, folder: Path) -> Timed:
    """The exit code of a command, and the number of modules that it imports."""
    words = [sys.executable, "-X", "importtime", "-m", *command.words]
    done = subprocess.run(words, cwd=folder, env=environment(checkout, command), capture_output=True, text=True)
    modules = len(re.findall(r"^import time: +\d", done.stderr, re.MULTILINE))
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.variables.items()]
    return Timed(" ".join([*variables, shlex.join(["python", "-m", *command.words])]), done.returncode, modules)


def run(checkout: Path, command: Command, folder: Path, timed: Timed) -> None:
    """Run a command once more and keep what it took."""
    began, used = time.perf_counter(), processor_seconds()
    subprocess.run(
        [sys.executable, "-m", *command.words],
        cwd=folder,
        env=environment(checkout, command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    timed.wall_s.append(round(time.perf_counter() - began, 4))
    timed.cpu_s.append(round(processor_seconds() - used, 4))


def measure(checkouts: Sequence[Path], runs: int, chosen: Sequence[str]) -> dict[str, list[Timed]]:
    """Each command's times, one `Timed` a checkout."""
    results: dict[str, list[Timed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            command = COMMANDS[name]
            results[name] = [first_run(checkout, command, Path(folder)) for checkout in checkouts]
            there = [
                (checkout, timed)
                for checkout, timed in zip(checkouts, results[name], strict=True)
                if timed.exit_code == command.exit_code
            ]
            for index in range(runs):
                for checkout, timed in there if index % 2 == 0 else reversed(there):
                    run(checkout, command, Path(folder), timed)
            print(f"{name}: {', '.join(text(timed) for timed in results[name])}", file=sys.stderr)
    return results


def text(timed: Timed) -> str:
    """Median, shortest and longest wall time."""
    if not timed.wall_s:
        return f"exit code {timed.exit_code}"
    return f"{statistics.median(timed.wall_s):.2f} s ({min(timed.wall_s):.2f} to {max(timed.wall_s):.2f})"


def rows(results: dict[str, list[Timed]]) -> list[list[str]]:
    """The table: a row a command, three columns a checkout, then the ratio of the last checkout to the first."""
    table = []
    for name, per_checkout in results.items():
        row = [name]
        for timed in per_checkout:
            cpu = f"{statistics.median(timed.cpu_s):.2f} s" if timed.cpu_s else ""
            row += [text(timed), cpu, str(timed.modules) if timed.wall_s else ""]
        first, last = per_checkout[0], per_checkout[-1]
        if len(per_checkout) > 1:
            both = first.cpu_s and last.cpu_s
            row.append(f"{statistics.median(last.cpu_s) / statistics.median(first.cpu_s):.2f}" if both else "")
        table.append(row)
    return table


def commit(checkout: Path) -> str:
    """The commit that is checked out, with a plus if files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True).stdout.strip()

    return f"{git('rev-parse', '--short', 'HEAD')}{'+' if git('status', '--porcelain', '-uno') else ''}"


def main(arguments: Sequence[str]) -> None:
    """Run, tabulate, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    parser.add_argument("--runs", type=int, default=7, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="the commands whose name has this text")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    checkouts = [path.resolve() for path in options.checkouts]
    load = os.getloadavg()
    results = measure(checkouts, options.runs, [name for name in COMMANDS if options.only in name])
    commits = [commit(checkout) for checkout in checkouts]
    headers = ["command"]
    for name in commits:
        headers += [f"{name}, wall", "processor", "modules"]
    print(tabulate(rows(results), [*headers, *(["processor, last / first"] if len(commits) > 1 else [])]))
    if options.out:
        report = {
            "made_by": f"python bench/startup.py --runs {options.runs}",
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load_before": [round(one, 2) for one in load],
            "commits": commits,
        }
        lines = [
            json.dumps({"name": name, "commit": one} | asdict(timed))
            for name, per_checkout in results.items()
            for one, timed in zip(commits, per_checkout, strict=True)
        ]
        # A line a command and checkout.
        head = json.dumps(report, indent=1).removesuffix("\n}")
        options.out.write_text(head + ',\n "commands": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
