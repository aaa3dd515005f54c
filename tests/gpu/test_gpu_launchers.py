"""All GPUs of this host at once: as many as there are, one will do."""

from collections import defaultdict

import pytest
from cli import records, run, without_progress

from attn_exp.core.host.nvml import visible_gpus
from attn_exp.results.read import read_folder

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_all_gpus_are_used_each_case_on_one_and_each_record_says_which(tmp_path):
    gpus = {gpu.uuid for gpu in visible_gpus()}
    batches = ",".join(str(batch) for batch in range(1, 2 * len(gpus) + 1))
    arguments = (
        "-m",
        "backend=flash,math",
        f"batch={batches}",
        "seq_len=512",
        "sweep=all",
        "tracker=none",
        "save_plots=false",
    )
    ran = run(*arguments, "hydra/launcher=local_gpus", cwd=tmp_path)
    assert (ran.returncode, without_progress(ran.stderr)) == (0, [])
    found = records(tmp_path, "all")
    assert {record.status for record in found.values()} == {"ok"}
    cases = defaultdict(set)
    for record in read_folder(tmp_path / "multirun" / "all").records():
        # What the worker saw is what the task had leased for it.
        assert record.environment["gpu_uuid"] == record.request.gpu_uuid
        cases[record.request.case].add(record.request.gpu_uuid)
    assert all(len(own) == 1 for own in cases.values())
    assert set.union(*cases.values()) == gpus
    again = run(*arguments, "hydra/launcher=local_gpus", cwd=tmp_path)
    assert f"{len(list((tmp_path / 'multirun' / 'all').glob('*/record.json')))} of" in again.stdout
