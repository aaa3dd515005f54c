"""Bisection on a GPU: 3 % planted in one of four versions of a package made here."""

import pytest
from test_bisect import wheel

from attn_exp.commands import bisect
from attn_exp.timers.gpu import SLEEP_CYCLES_PER_US

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MODULE = """
import torch

from attn_exp.backends.sdpa import Flash

class Attention(Flash):
    def prepare(self, case, inputs):
        from dataclasses import replace

        calls = super().prepare(case, inputs)

        def forward():
            torch.cuda._sleep(int({us} * CYCLES))
            return calls.forward()

        return replace(calls, forward=forward)
"""


def test_three_percent_are_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()
    for number in range(4):
        # Some 100 us of attention come on top: 3 %.
        module = MODULE.replace("CYCLES", str(SLEEP_CYCLES_PER_US))
        wheel(tmp_path / "wheels", f"1.{number}", 1000 if number < 2 else 1035, module=module)
    words = ["good=slowly==1.0", "bad=slowly==1.3", "wheels=wheels", "backend._target_=slowly.Attention"]
    code = bisect.main([*words, "model=sdpa_bench", "batch=2", "seq_len=1024"])
    out = capsys.readouterr().out
    assert (code, out.splitlines()[-1].split(";")[0]) == (0, "slowly==1.2 is the first slow one"), out
