"""Search for a bug: `python -m attn_exp.hunt --reply-fd N`, for `attn-exp hunt`.

Reads a `Question` as JSON from standard input, and writes the state of the search (`Search`) as lines of JSON.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from attn_exp.backends.base import load_backend
from attn_exp.backends.package import Unavailable
from attn_exp.backends.supports import Supports
from attn_exp.core.case import DTYPE_BYTES
from attn_exp.core.errors import UserError
from attn_exp.core.hunting import Find, Outcome, Question, Script, Search, Space, Task
from attn_exp.core.process import available_bytes, die_with_parent
from attn_exp.hunt.judge import Judge
from attn_exp.hunt.script import script_of
from attn_exp.hunt.search import Missing, Searching
from attn_exp.hunt.space import Examples
from attn_exp.hunt.tester import Hello, Tester
from attn_exp.worker.attempt import error_summary

_SCRIPT_S = 120.0
# Runs a script where this package cannot be imported.
_WITHOUT = (
    "import runpy, sys; sys.modules['attn_exp'] = None; sys.argv[1:] = []; runpy.run_path({!r}, run_name='__main__')"
)


def search(question: Question, show: Callable[[Search], None]) -> Search:
    """Search until a bug is found and shrunk, or the budget is spent; return the last state."""
    space = Space(question.where)
    tester = Tester(functools.partial(_made, question), question.device)
    hello = tester.hello()
    if hello.missing is not None:
        return Search(over=True, mistake=hello.missing)
    everything = Supports(
        devices=("cuda", "cpu"), dtypes=tuple(DTYPE_BYTES), window=True, prefix=True, chunk=True, softcap=True,
        packed=True, keyless=True, value_dims="any",
    )  # fmt: skip
    examples = Examples(hello.supports or everything, space, question.device)
    searching = Searching(tester, show)
    began = time.monotonic()
    end = began + question.budget_s
    # Most bugs are of small shapes; large offsets have a part of the time, those that need memory the last of it.
    small, large = (value in space.among("large", (False, True)) for value in (False, True))
    stages = [
        *([(examples.small(), 5.0)] if small else []),
        *([(examples.spread(), 1.0), (examples.whole(_memory(question.device)), 3.0)] if large else []),
        *([(examples.small(), 1.0)] if small else []),
    ]
    # The end of the budget is for making a late find smaller.
    unit = 0.9 * question.budget_s / sum(part for _, part in stages)
    try:
        for index, (strategy, _) in enumerate(stages):
            until = began + unit * sum(part for _, part in stages[: index + 1])
            if searching.state.find is None and time.monotonic() < until:
                searching.run(strategy, until, end, seed=question.seed + index)
        state = searching.state
        if state.find is not None:
            show(replace(state, now="the script of what was found"))
            state = replace(state, find=_shown(state.find, tester))
    except Missing as missing:
        return Search(over=True, mistake=str(missing))
    finally:
        tester.close()
    if not state.tried:
        why = state.why or "nothing of what where= leaves can be computed"
        return Search(over=True, mistake=f"no example could be tried: {why}")
    return replace(state, over=True, spent_s=time.monotonic() - began)


def _made(question: Question) -> tuple[Hello, Callable[[Task], Outcome | Script]]:
    """Load the backend, in the process that runs examples."""
    try:
        backend = load_backend(question.backend)
    except Unavailable as error:
        missing = Outcome(status="unavailable", reason=str(error))
        return Hello(missing=str(error)), lambda task: missing
    judge = Judge(backend, question.device)
    supports = getattr(backend, "supports", None)

    def done(task: Task) -> Outcome | Script:
        if task.outcome is None:
            return judge.outcome(task.example)
        try:
            return script_of(backend, task.example, task.outcome, question.device)
        except Exception as error:  # the backend's preparation may raise anything
            return Script(text="", why_not=error_summary(error))

    return Hello(supports=supports if isinstance(supports, Supports) else None), done


def _shown(find: Find, tester: Tester) -> Find:
    """Return a find with its script, which is run to see whether it shows the bug."""
    script = tester.script(find.example, find.outcome)
    tester.close()
    if script is None or not script.text or script.why_not:
        return replace(find, script=script)
    with tempfile.TemporaryDirectory(prefix="attn_exp-") as folder:
        path = Path(folder, "bug.py")
        path.write_text(script.text, encoding="utf-8")
        try:
            ran = subprocess.run(
                [sys.executable, "-c", _WITHOUT.format(str(path))], capture_output=True, timeout=_SCRIPT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return replace(find, script=script)
    # A program that fails for another reason also ends with 1.
    return replace(find, script=script, shown=ran.returncode == 1 and b"Traceback" not in ran.stderr)


def _memory(device: str) -> int:
    """Return how many bytes a large example may take."""
    if device == "cpu":
        return available_bytes() * 7 // 10
    ran = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return int(ran.stdout or 0) * 8 // 10


def main() -> None:
    """Answer the question on standard input."""
    parser = argparse.ArgumentParser(prog="python -m attn_exp.hunt")
    parser.add_argument("--reply-fd", type=int, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, required=True, help=argparse.SUPPRESS)
    given = parser.parse_args()
    die_with_parent(given.parent)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)

    def show(state: Search) -> None:
        os.write(given.reply_fd, msgspec.json.encode(state) + b"\n")

    try:
        show(search(question, show))
    except UserError as error:
        show(Search(over=True, mistake=str(error)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
