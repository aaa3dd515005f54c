"""What is being done: one line on a terminal that is removed in the end, plain lines elsewhere, nothing if quiet."""

import errno
import io
import re
import time
from types import SimpleNamespace

import pytest
import sweeps

from attn_exp.core import live_line, text
from attn_exp.core.live_line import LiveLine
from attn_exp.execution.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def frames(written):
    """What a terminal shows between two removals of a line."""
    return [frame for part in re.split(r"\r|\n", written) if (frame := re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", part))]


def waited(out, text):
    until = time.monotonic() + 240
    while not re.search(text, out.getvalue()) and time.monotonic() < until:
        time.sleep(0.02)
    return out.getvalue()


def test_on_a_terminal_one_line_says_the_job_its_stage_and_the_time_left_and_is_removed(terminal):
    progress = Progress(terminal)
    progress.total = 24
    progress.finished(sweeps.job("math", 601.2, 2465.0))
    progress._ends = time.monotonic() + 500
    progress.running("flash b1 h16 s4096 d128 bf16 causal")
    progress.line.stage("compile")
    waited(terminal, "compile")
    progress.say("a result")
    progress.line.close()
    shown = frames(terminal.getvalue())
    assert any(re.fullmatch(r"\S{12}  2/24 flash .* causal  compile  \d min \d+ s left", one) for one in shown)
    assert max(len(one) for one in shown if "2/24" in one) <= 80
    assert any(one.startswith("[ 1/24] ok") for one in shown) and "a result" in shown
    # In place, removed, and the cursor is there again.
    assert terminal.getvalue().count("\n") <= 6
    assert terminal.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_the_time_left_follows_from_the_share_that_is_done_and_ticks(terminal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    line = LiveLine(terminal)
    line.show("check 8")
    now[0] = 110.0
    line.show("check 8", done=0.25, total=1.0)
    for now[0], seconds in ((110.0, "30 s left"), (125.0, "15 s left"), (145.0, "45 s")):
        with line.aside():
            pass
        assert frames(terminal.getvalue())[-1].endswith(f"check 8  {seconds}")
    line.close()


def test_quiet_says_nothing(terminal):
    pipe = io.StringIO()
    for stream in (terminal, pipe):
        progress = Progress(stream, LiveLine(stream, quiet=True))
        progress.running("flash")
        progress.finished(sweeps.job("flash", 601.2, 2465.0))
        progress.line.close()
        assert stream.getvalue() == ""


class Full(Terminal):
    """A terminal's output on a disk that is full."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_that_takes_nothing_does_not_end_the_sweep(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(Full())
    progress.running("flash")
    progress.say("one")
    progress.note("two")
    progress.line.close()
    assert progress.unwritten == "No space left on device"


def test_a_finished_job_s_line_is_broken_between_words_where_the_terminal_ends(monkeypatch, terminal):
    monkeypatch.setattr(text, "terminal_columns", lambda _: 80)
    progress = Progress(terminal)
    progress.finished(sweeps.job("flash", 601.2, 2465.0))
    progress.line.close()
    lines = frames(terminal.getvalue())
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).endswith("TFLOPS"), lines
