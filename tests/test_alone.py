"""One command at a time runs a sweep: another one is refused in a sentence, and a dead one's hold is over."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drill.starts import Starts

from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.core.errors import UserError
from attn_exp.execution import context as context_module
from attn_exp.execution.context import LOCK_NAME, SweepContext, open_context

HOLD = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(context_module, "_END_S", 0.2)
    words = ["tracker=none", "sweep=a", "device=cpu"]
    return dict(resolved_config(compose_config(words, "a"), words))


def opened(options: dict[str, Any]) -> SweepContext:
    return open_context(options, "command", lambda line: None)


def test_a_sweep_that_is_held_is_refused_and_a_dead_holder_is_not_waited_for(
    options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "multirun" / "a"
    folder.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / LOCK_NAME)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=r"another command is running sweep=a: wait for it, or choose another name"):
        opened(options)
    assert list(folder.iterdir()) == [folder / LOCK_NAME]
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    opened(options).abandon("FAILED")
    # Whoever has ended lets go, in this process too.
    context = opened(options)
    with pytest.raises(UserError, match="another command is running"):
        opened(options)
    context.abandon("FAILED")
    opened(options).abandon("FAILED")


def test_commands_started_together_measure_nothing_twice(tmp_path: Path) -> None:
    """Two with jobs that overlap; `make drill STARTS=20` has the other kinds."""
    starts = Starts(tmp_path, 1)
    starts.run()
    assert starts.wrong == []
    assert starts.counts.pop("refused while another one runs") > 0
    assert list(starts.counts.values()) == [1]
