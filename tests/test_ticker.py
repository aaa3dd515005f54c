"""The line that says what is being done: in time, in place on a terminal, and gone in the end."""

import io
import time

from attn_exp.core.ticker import STAGE, Ticker


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError


def test_what_is_quick_says_nothing():
    out = io.StringIO()
    with Ticker(out) as ticker:
        ticker.stage("reading")
    assert out.getvalue() == ""


def test_quiet_says_nothing_however_long_it_takes():
    out = io.StringIO()
    with Ticker(out, quiet=True, delay_s=0.0) as ticker:
        ticker.stage("reading")
        time.sleep(0.1)
    assert out.getvalue() == ""


def waited(out, text):
    until = time.monotonic() + 20
    while text not in out.getvalue() and time.monotonic() < until:
        time.sleep(0.02)
    return out.getvalue()


def test_in_a_file_each_stage_is_a_line_and_stays():
    out = io.StringIO()
    with Ticker(out, delay_s=0.0) as ticker:
        ticker.stage("reading")
        assert "reading, 0 s\n" in waited(out, "reading")
        ticker.stage("drawing")
        assert "drawing, " in waited(out, "drawing")
    assert "\x1b" not in out.getvalue()
    assert [line.partition(",")[0] for line in out.getvalue().splitlines()] == ["reading", "drawing"]


def test_on_a_terminal_the_line_is_written_anew_and_removed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Ticker(out, delay_s=0.0) as ticker:
        ticker.stage("reading")
        waited(out, "reading")
        with ticker.aside():
            assert out.getvalue().endswith("\r\x1b[K")
    assert out.getvalue().endswith("\r\x1b[K")
    assert "\n" not in out.getvalue()


def test_time_left_follows_from_the_share_that_is_done():
    ticker = Ticker(io.StringIO(), quiet=True)
    ticker.stage("check 8", 0.25)
    ticker._began -= 10.0
    assert ticker.line() == "check 8, 10 s, 30 s left"
    ticker.stage("check 8", 0.0)
    assert ticker.line() == "check 8, 10 s"
    ticker.stage("check 8", expected_s=25.5)
    assert ticker.line() == "check 8, 10 s, about 15 s left"
    ticker.stage("check 8", expected_s=9.0)
    assert ticker.line() == "check 8, 10 s"


def test_a_child_s_stages_are_shown_and_its_lines_printed(capsys):
    ticker = Ticker(io.StringIO(), quiet=True)
    ticker.relay([f"{STAGE}0.5000 check 4\n", "pass  4\n", f"{STAGE}0.0000 check 8\n"])
    assert capsys.readouterr().out == "pass  4\n"
    assert ticker.line().startswith("check 8, ")
