"""What a job may leave of umask, folder, processors, priority and limits."""

import os
import resource
import subprocess
import sys
import textwrap

import pytest

from attn_exp.worker.machine import process_state
from attn_exp.worker.machine.process_state import ProcessState


def test_what_cannot_be_set_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: object) -> None:
        raise PermissionError

    files = f"limit {resource.RLIMIT_NOFILE}"
    read, _ = process_state._STATE[files]
    before = ProcessState.now()
    soft, hard = read()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        with monkeypatch.context() as patch:
            patch.setitem(process_state._STATE, files, (read, refuse))
            assert not before.restore()
        assert before.restore()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_removed_folder_is_no_reason_to_fail() -> None:
    """In a process of its own, which ends in it."""
    program = """
        import os, tempfile
        from attn_exp.worker.machine.process_state import ProcessState
        os.chdir(folder := tempfile.mkdtemp())
        before = ProcessState.now()
        os.chdir("/")
        os.rmdir(folder)
        assert not before.restore()
        os.mkdir(folder)
        os.chdir(folder)
        os.rmdir(folder)
        removed = ProcessState.now()
        assert removed.restore()
        os.chdir("/")
        assert not removed.restore()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, env=os.environ)
