"""Ask the backends, in a child process, what they can compute, and make tables of the answers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.config.request import named_backend
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.errors import UserError
from attn_exp.core.record.request import Request
from attn_exp.core.sheet.render import grid, sheet_markdown
from attn_exp.core.sheet.sheet import Column, Sheet
from attn_exp.execution.progress import Progress
from attn_exp.execution.worker_process import worker_variables
from attn_exp.results.store import done_record

_ASK_S = 300
# The seconds of importing torch, without a look for garbage: the process answers once and ends.
_ANSWERED = (
    "import sys; sys.path.append(sys.path.pop(0)); import gc, runpy; gc.disable(); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


def ask(job: Request | None, own_choices: Path | None = None) -> list[dict[str, Any]]:
    """Ask all backends, also those of `--config-dir`, in a child process, which imports torch and their packages.

    Raises UserError if a file does not describe a backend, or a backend ends the process.
    """
    folders = [folder / "backend" for folder in (conf_folder(), own_choices) if folder]
    configs = [configured(path) for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return _asked(configs, [job] * len(configs))


def possible(requests: Sequence[Request | UserError], folder: Path, progress: Progress) -> list[Request | UserError]:
    """Return the requests, with the reason in place of one that cannot be measured here and has no record in `folder`.

    A child process asks their backends; if one of these ends it, the requests stay as they are.
    """
    progress.line.show("asking the backends")
    asked = [
        request
        for request in requests
        if isinstance(request, Request) and done_record(request, folder / request.job) is None
    ]
    try:
        reasons = refusals(asked)
    except UserError as error:
        progress.note(str(error))
        return list(requests)
    impossible = {job: UserError(reason) for job, reason in reasons.items()}
    return [impossible.get(request.job, request) if isinstance(request, Request) else request for request in requests]


def refusals(jobs: Sequence[Request]) -> dict[str, str]:
    """Return why jobs cannot be measured here, by name, without those that can. Raises UserError as `ask` does."""
    answers = _asked([job.backend for job in jobs], jobs) if jobs else []
    reasons = [(one, said["missing"] or said["refusal"]) for one, said in zip(jobs, answers, strict=True)]
    return {one.job: f"{one.label}: {reason}" for one, reason in reasons if reason}


def _asked(backends: Sequence[dict[str, Any]], jobs: Sequence[Request | None]) -> list[dict[str, Any]]:
    # Without the whole configuration of each.
    question = {"backends": backends, "jobs": [job and replace(job, config={}) for job in jobs]}
    answers: list[dict[str, Any]] = msgspec.json.decode(answer_of("attn_exp.worker.capabilities", question))
    return answers


def answer_of(module: str, question: Any) -> bytes:
    """Return what a module of the worker's answers to a question, both as JSON; it may import torch.

    Raises UserError if it ended without an answer.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _ANSWERED, module],
            input=msgspec.json.encode(question),
            env=worker_variables(os.environ),
            capture_output=True,
            check=False,
            timeout=_ASK_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the backends could not be asked: they took longer than {_ASK_S} s") from error
    if ran.returncode:
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"the backends could not be asked: {' '.join(last)}")
    return ran.stdout


def configured(path: Path) -> dict[str, Any]:
    """Return the options in a backend's file. Raises UserError if it names no class."""
    try:
        return named_backend(read_yaml(path))
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is no backend: it needs a line _target_: package.module.Class") from error
    except (OSError, msgspec.DecodeError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def table(answers: Sequence[dict[str, Any]]) -> str:
    """Return a table of all backends for a terminal of 120 columns, and why some are not available."""
    heads = (("backend", 16), ("version", 12), ("about", 46), ("can compute", 40))
    rows = tuple(
        (answer["name"], answer["version"] or "-", answer["about"], answer["can_compute"]) for answer in answers
    )
    missing = [f"{answer['name']}: {answer['missing']}" for answer in answers if answer["missing"]]
    below = ["not available here:", *missing] if missing else ["all are available here"]
    return "\n".join([grid(_sheet(heads, rows)), "", *below])


def verdicts(answers: Sequence[dict[str, Any]]) -> str:
    """Return a table that says for each backend whether it can compute the case here, or could elsewhere, or why not.

    What it could compute follows from what it declares, without its package or a GPU.
    """
    heads = (("backend", 16), ("here", 4), ("could", 5), ("why not", 84))
    reasons = [answer["declared"] or answer["missing"] or answer["refusal"] for answer in answers]
    rows = tuple((one["name"], not why, not one["declared"], why) for one, why in zip(answers, reasons, strict=True))
    return grid(_sheet(heads, rows))


def _sheet(heads: Sequence[tuple[str, int]], rows: tuple[tuple[Any, ...], ...]) -> Sheet:
    return Sheet("backends", "", tuple(Column(head, head, fold=fold) for head, fold in heads), rows)


def markdown(answers: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/backends.md, which does not depend on the machine."""
    heads = ("backend", "what it is", "can compute", "needs")
    rows = tuple(
        (f"`{answer['name']}`", answer["about"], answer["can_compute"], f"`{answer['needs']}`" * bool(answer["needs"]))
        for answer in answers
    )
    return sheet_markdown(Sheet("backends", "", tuple(Column(head, head, "markdown") for head in heads), rows))
