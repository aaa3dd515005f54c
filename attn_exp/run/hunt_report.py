"""What `attn-exp hunt` prints: a line while it searches, and what it found."""

import shlex
from typing import Any

from attn_exp.core.hunting import Find, Question, Search, overrides
from attn_exp.core.text import word


def progress_line(state: Search) -> str:
    """Return the state of a search in one line."""
    found = "making it smaller" if state.find is not None else "nothing found"
    return f"{state.spent_s:.0f} s, {state.tried} tried, {found}: {state.now}"


def lines_of(question: Question, state: Search, script: str | None) -> list[str]:
    """Return what is printed at the end of a search.

    Args:
        question: what was searched.
        state: its last state.
        script: the file that the script is written to, if any.
    """
    counted = f"{state.tried} examples in {state.spent_s:.0f} s"
    counted += f", {state.large} of them with offsets above 2^31" if state.large else ""
    left_out = [f"{state.refused} refused by the backend"] * bool(state.refused)
    left_out += [f"{state.too_large} too large for the memory"] * bool(state.too_large)
    counted += f"; not counted: {', '.join(left_out)}" if left_out else ""
    name = str(question.backend["name"])
    if state.find is None:
        lines = [f"{name}: nothing found. {counted}; seed={question.seed}"]
        return [*lines, *state.notes]
    return [
        *_found(name, question, state.find),
        "",
        *_script(state.find, script),
        "",
        f"{counted}; seed={question.seed}",
    ]


def _found(name: str, question: Question, find: Find) -> list[str]:
    outcome, example = find.outcome, find.example
    what = {"error": "raises ", "crashed": "crashes: ", "timeout": "does not return: "}.get(outcome.status, "")
    command = ["attn-exp", "run", *_backend(question.backend), *overrides(example, question.device)]
    lines = [
        f"{name}: {what}{outcome.reason}",
        f"found after {find.after_s:.1f} s; the smallest case that shows it: {example.label()}",
        "",
        shlex.join(command),
    ]
    if example.large is not None:
        differs = "zeros but in a few heads" if example.large == "whole" else f"with large steps in {example.large}"
        lines.append(f"(the search has tensors {differs}, a run has not: the program below shows it)")
    return lines


def _backend(backend: dict[str, Any]) -> list[str]:
    return [f"++backend.{key}={word(value)}" for key, value in backend.items()]


def _script(find: Find, path: str | None) -> list[str]:
    script = find.script
    if script is None or not script.text:
        return [f"no script: {script.why_not if script is not None else 'the backend cannot be prepared again'}"]
    said = {True: "it was run and shows the bug", False: "it was run and does not show the bug", None: "it was not run"}
    lines = [f"# a program that shows it without attn_exp ({said[find.shown]}){f': {path}' if path else ''}"]
    if script.why_not:
        lines[0] = f"# fill in the call: {script.why_not}"
    return [*lines, *script.text.splitlines()]
