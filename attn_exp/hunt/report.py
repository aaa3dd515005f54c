"""What `attn-exp hunt` shows: it follows the search's process, and prints what that found."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import msgspec

from attn_exp.core.errors import UserError, how_it_ended, last_message
from attn_exp.core.live_line import LiveLine
from attn_exp.core.text import word
from attn_exp.hunt.example import Question, Search


def search(question: Question, environment: Mapping[str, str]) -> Search:
    """Search until a bug is found or the budget is spent; print progress to standard error.

    Raises UserError if the backend cannot be loaded, or the search's process died.
    """
    where = "the GPU" if question.device == "cuda" else "the CPU"
    name = question.backend["name"]
    state, what = Search(), f"hunting in {name}"
    print(f"{what} on {where} for {question.budget_s:g} s, seed={question.seed}", file=sys.stderr, flush=True)
    with LiveLine() as line, tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "attn_exp.hunt", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            env={**environment, "HYPOTHESIS_STORAGE_DIRECTORY": folder},
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as asked:
                asked.write(msgspec.json.encode(question))
            for answer in process.stdout:
                state = msgspec.json.decode(answer, type=Search)
                line.show(what, done=state.spent_s, total=max(question.budget_s, state.spent_s))
                found = "nothing found" if state.example is None else "making it smaller"
                line.stage(f"{state.tried} tried, {found}: {state.now}")
            process.wait()
        finally:
            # The process that runs examples is a child of the search and dies with it.
            process.kill()
            process.wait()
        if not state.over:
            log.seek(0)
            said = last_message(log.read().decode(errors="replace"))
            raise UserError(f"{name}: the search {how_it_ended(process.returncode)}: {said}")
    if state.mistake is not None:
        raise UserError(f"{name}: {state.mistake}")
    return state


def lines_of(question: Question, state: Search, case_words: Sequence[str]) -> list[str]:
    """Return what is printed at the end of a search; `case_words` are the case of the find as overrides."""
    counted = f"{state.tried} examples in {state.spent_s:.0f} s"
    counted += f", {state.large} of them with offsets above 2^31" if state.large else ""
    left_out = [f"{state.refused} refused by the backend"] * bool(state.refused)
    left_out += [f"{state.too_large} too large for the memory"] * bool(state.too_large)
    counted += f"; not counted: {', '.join(left_out)}" if left_out else ""
    name, example, outcome = str(question.backend["name"]), state.example, state.outcome
    if example is None or outcome is None:
        return [f"{name}: nothing found. {counted}; seed={question.seed}"]
    what = {"error": "raises ", "crashed": "crashes: ", "timeout": "does not return: "}.get(outcome.status, "")
    more = [f"inputs={example.inputs}"] * (example.inputs != "normal") + ["passes=[forward]"] * (not example.backward)
    options = [f"++backend.{key}={word(value)}" for key, value in question.backend.items()]
    ends = [*case_words, *more, f"seed={example.seed}", f"device={question.device}"]
    steps = f"(the search has large steps in {example.large}, a run has not: the same seed= finds it again)"
    return [
        f"{name}: {what}{outcome.reason}",
        f"found after {state.after_s:.1f} s; the smallest case that shows it: {example.label()}",
        "",
        shlex.join(["attn-exp", "run", *options, *ends]),
        *([steps] if example.large is not None else []),
        "",
        f"{counted}; seed={question.seed}",
    ]
