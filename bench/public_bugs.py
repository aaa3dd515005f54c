"""python bench/public_bugs.py [--device cpu|cuda] [--processes N] [--budget-s S] [--markdown FILE] [NAME ...]

Asks of each public bug of the installed libraries whether it is here: a line each with its report, `yes`, `no` or
`not applicable`, and what was seen. Each runs in a process of its own, so that one that crashes or hangs is a line.
The bugs are in bench/bugs_anywhere.py and bench/bugs_cuda.py.
"""

import argparse
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from apart import Apart, Ended
from tabulate import tabulate

from attn_exp.core.host.nvml import list_gpus

OWNERS = {"pytorch": "pytorch", "cudnn-frontend": "NVIDIA", "flash-attention": "Dao-AILab"}
_LIMIT_S = 40.0
_LONGEST = 160


class NotHere(Exception):
    """The bug does not concern this machine; the message says why."""


@dataclass(frozen=True)
class Bug:
    """A public report.

    Attributes:
        name: the repository and the number of the report.
        what: what is wrong, in a few words.
        ask: takes the device; returns whether the bug is there, and what was seen.
        ours: the command of attn_exp that has such cases, or why none has.
        devices: where it was reported.
        raises: what the message of the exception says if the bug is an exception.
        ends: whether the bug is a crash or a hang.
    """

    name: str
    what: str
    ask: Callable[[str], tuple[bool, str]]
    ours: str
    devices: tuple[str, ...] = ("cuda",)
    raises: str | None = None
    ends: bool = False

    @property
    def url(self) -> str:
        """The address of the report."""
        repository, number = self.name.split("#")
        return f"https://github.com/{OWNERS[repository]}/{repository}/issues/{number}"


@dataclass(frozen=True)
class Answer:
    """`present` is `yes`, `no`, `not applicable`, or `unknown` if the question itself failed."""

    present: str
    evidence: str


def asked(bug: Bug, device: str) -> Answer:
    """Ask in this process."""
    try:
        there, seen = bug.ask(device)
    except NotHere as error:
        return Answer("not applicable", str(error))
    except Exception as error:  # libraries raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        shows = bug.raises is not None and re.search(bug.raises, text)
        return Answer("yes" if shows else "unknown", text[:_LONGEST])
    return Answer("yes" if there else "no", seen)


def answers(bugs: Sequence[Bug], device: str, processes: int, budget_s: float) -> Iterator[tuple[Bug, Answer]]:
    """Ask of each bug in a process of its own, and yield the answers as they come."""

    def work(name: str) -> Iterator[Answer]:
        yield asked(left[name], device)

    left = {bug.name: bug for bug in bugs if device in bug.devices}
    for bug in bugs:
        if bug.name not in left:
            yield bug, Answer("not applicable", f"reported of {' and '.join(bug.devices)}")
    pool = Apart(work, processes, _LIMIT_S, renewed=True)
    answered = set()
    for name, said in pool.run(deque(left), time.monotonic() + budget_s):
        # A process may still end after its answer, while CUDA is torn down.
        if name not in answered:
            answered.add(name)
            bug, ended = left[name], isinstance(said, Ended)
            yield bug, Answer("yes" if bug.ends else "unknown", f"the process {said.how}") if ended else said
    for bug in left.values():
        if bug.name not in answered:
            yield bug, Answer("unknown", "the time was over")


def versions(device: str) -> str:
    """The machine and the libraries that matter."""
    import torch

    parts = [list_gpus()[0].name if device == "cuda" else f"CPU ({platform.machine()})", f"torch {torch.__version__}"]
    if device == "cuda":
        parts += [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    return ", ".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    from bugs_anywhere import ANYWHERE
    from bugs_cuda import CUDA

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    import torch  # for the processes, which are forked, and must find CUDA not initialised

    here = "cuda" if torch.version.cuda and list_gpus() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(words)
    if given.device == "cuda" != here:
        parser.error("--device cuda needs an NVIDIA GPU, and a torch for CUDA")
    bugs = [bug for bug in (*ANYWHERE, *CUDA) if not given.names or bug.name in given.names]
    found: dict[str, Answer] = {}
    for bug, answer in answers(bugs, given.device, given.processes, given.budget_s):
        found[bug.name] = answer
        print(f"{bug.name:22} {answer.present:15} {bug.what}: {answer.evidence}  {bug.url}", flush=True)
    # Last, since asking for cuDNN's version initialises CUDA.
    title = versions(given.device)
    print(title, flush=True)
    if given.markdown:
        rows = [
            [f"[{bug.name}]({bug.url})", bug.what, found[bug.name].present, found[bug.name].evidence, bug.ours]
            for bug in bugs
        ]
        head = ["report", "what is wrong", "here", "seen", "where attn_exp has such cases"]
        given.markdown.write_text(f"{title}\n\n{tabulate(rows, head, tablefmt='github')}\n")
    return 0


if __name__ == "__main__":
    # Those modules import this one by its name.
    sys.modules["public_bugs"] = sys.modules["__main__"]
    sys.exit(main())
