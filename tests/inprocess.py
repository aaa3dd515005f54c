"""Runs the command line in this process: what it says and how it exits, without the seconds of another one."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from cli import without_progress
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from attn_exp.cli import dispatch
from attn_exp.core.host import nvml
from attn_exp.execution import capabilities
from attn_exp.execution.worker import Worker

Typed = Callable[..., tuple[int, str, str]]


def typed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Typed:
    """`python -m attn_exp ARGUMENTS` in `folder`, where no worker may be started: exit code, output, errors.

    The errors are without progress, which a busy machine makes.
    """

    def forbidden(worker: Worker) -> None:
        raise AssertionError("a worker was started")

    def call(*arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["attn_exp", *arguments])
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = dispatch(arguments)
            finally:
                GlobalHydra.instance().clear()
                HydraConfig.instance().cfg = None
        return code, out.getvalue(), "".join(f"{line}\n" for line in without_progress(err.getvalue()))

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Worker, "start", forbidden)
    # Started ahead of everything, in a process of its own: tests of that are end to end.
    monkeypatch.setattr("attn_exp.commands.run.start_ahead", lambda worker: None)
    # A process that imports torch, too.
    monkeypatch.setattr(capabilities, "refusals", lambda requests: {})
    monkeypatch.setattr(nvml, "list_gpus", list)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return call
