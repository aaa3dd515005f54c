"""Every backend of the corpus in cheats/ gets the status that it must get, and every honest one is `ok`."""

import os
import re
from pathlib import Path

import msgspec
import pytest
import torch
from cheats.corpus import Entry, load
from cheats.run import outcome, request_of, shared_machine

from attn_exp.core.record.file import read_record
from attn_exp.core.record.request import REQUEST_NAME
from attn_exp.execution.worker import Worker

TESTS = Path(__file__).resolve().parent
# More than an honest job takes on a busy machine, from the first look at the device to its record.
LIMIT_S = 120.0
# One that waits for ever waits for so long: its worker is ready before.
SHORT_S = 4.0
HERE = [entry for entry in load() if entry.device == "cpu"]


@pytest.fixture(scope="module")
def machine():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield shared_machine()
    torch.set_num_threads(threads)


def check(entry: Entry, status: str, reason: str | None) -> None:
    found = f"{entry.about} It ended {status}: {reason}"
    assert status in entry.statuses, found
    assert entry.words is None or re.search(entry.words, reason or ""), found
    # Another attention is named only for what is one.
    named = re.search("out is attention|gradients are those of", reason or "")
    assert named is None or named[0] in (entry.words or ""), found


@pytest.mark.parametrize("entry", [one for one in HERE if not one.worker], ids=lambda entry: entry.name)
def test_a_cheat_is_found_and_an_honest_backend_is_ok(machine, entry):
    record, rival = outcome(entry, machine)
    check(entry, record.status, record.reason)
    assert bool(record.metrics) == (record.status == "ok")
    assert rival is None or rival.status == "ok", rival.reason


def test_a_worker_that_hangs_or_dies_on_changed_inputs_is_replaced_and_the_next_job_is_ok(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    last = next(entry for entry in HERE if entry.name == "AsWritten")
    worker = Worker(reuse=True, timeout_s=LIMIT_S)
    entries = [*(one for one in HERE if one.worker), last]
    try:
        for entry in entries:
            folder = tmp_path / entry.name
            folder.mkdir()
            (folder / REQUEST_NAME).write_bytes(msgspec.yaml.encode(request_of(entry)))
            worker.submit(folder)
        for entry in entries:
            worker.timeout_s = SHORT_S if "timeout" in entry.statuses else LIMIT_S
            ended = worker.wait()
            record = read_record(ended.folder)
            assert (record is None) == (ended.status is not None)
            check(entry, ended.status or record.status, ended.reason if record is None else record.reason)
    finally:
        worker.close()
