"""Standard output that takes nothing: results for programs are not lost in silence."""

import subprocess
import sys

import cli
import pytest
import sweeps


@pytest.mark.parametrize("output", [">/dev/full", ">&-"])
def test_a_command_says_that_its_results_are_not_written(output, tmp_path):
    sweeps.write(tmp_path / "multirun" / "a", [sweeps.job("flash", 100), sweeps.job("cudnn", 80)])
    command = f"{sys.executable} -m attn_exp compare a {output}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "standard output cannot be written: " in done.stderr
