"""A terminal that knows ASCII only: letters that it lacks are shown as question marks, and end nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sweeps

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def attn_exp(folder: Path, *words: str | bytes, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_exp", *words]
    known = {"PATH": os.environ["PATH"]} | environment
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize("environment", [ASCII, {"PYTHONIOENCODING": "ascii:strict"}])
def test_letters_that_a_terminal_lacks_are_question_marks(tmp_path: Path, environment: dict[str, str]) -> None:
    records = [sweeps.job(), sweeps.failed(backend="math", reason="café → 日本")]
    sweeps.write(tmp_path / "multirun" / "first", records)
    for form in ("table", "markdown"):
        ran = attn_exp(tmp_path, "compare", "first", f"format={form}", **environment)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "math unsupported: caf? ? ??" in ran.stdout
