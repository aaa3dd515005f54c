"""The corpus on a GPU: what cheats or errs gets its status and its words, and what is honest but odd stays `ok`.

How to run, on a machine with an NVIDIA GPU of compute capability 9.0 or more, for fp8 (meant to take less than 150 s):

    python -m pytest -m gpu tests/gpu/test_gpu_cheats.py           # all of them
    python -m pytest -m gpu tests/gpu/test_gpu_cheats.py -k Half   # by the names of the classes
    python -m pytest -m gpu tests/gpu/test_gpu_cheats.py -k apart  # those that need a worker process

The entries are in tests/cheats/gpu. Most are measured in this process, one job each, with both checks of its result
and a short timing; what they replaced is put back afterwards. Those that end or poison their process run in workers,
between honest jobs that must not notice. Neither Hydra nor MLflow is needed. Where a kernel or a piece of Python can be
tried without a GPU, tests/test_gpu_cheats_without.py does so.
"""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from cheats.corpus import Entry, load
from cheats.gpu import memory
from cheats.gpu.base import SHORT
from cheats.ways import restore
from fakes import make_request

from attn_exp.core.record.file import read_record
from attn_exp.core.record.request import REQUEST_NAME, Request
from attn_exp.execution.worker import Worker
from attn_exp.worker.measure import measure

pytestmark = pytest.mark.gpu

# Sorted by their cases, since a machine keeps the reference of the last one.
ENTRIES = sorted(
    (entry for entry in load() if entry.device == "cuda"),
    key=lambda entry: (repr(entry.case), entry.passes, entry.name),
)
# Other processes stretch the kernels of a trace, by which a side stream is judged: an honest backend has none.
HERE = [
    pytest.param(entry, marks=[pytest.mark.alone] * (entry.group == "honest")) for entry in ENTRIES if not entry.worker
]
APART = [entry for entry in ENTRIES if entry.worker]
# With the seconds in which a worker opens the device.
JOB_LIMIT_S = 20.0
HONEST = {"_target_": "cheats.gpu.base.OnGpu", "name": "ongpu"}


def request_of(entry: Entry) -> Request:
    """Return the entry's job."""
    timer = entry.timer or "device"
    also = ("kernel",) if timer == "device" else ()
    backend = {"_target_": entry.target, "name": entry.name.lower(), **entry.options}
    made = make_request(backend, entry.case, timer=timer, also=also, budget_s=0.02, passes=entry.passes)
    return replace(made, device="cuda", compile=entry.compile)


@pytest.fixture(autouse=True)
def _leaves_this_process_as_it_was():
    yield
    restore()
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.current_stream())


def assert_ended(entry: Entry, status: str, reason: str | None) -> None:
    """Fail unless the entry ended as it must."""
    assert status in entry.statuses, f"{entry.name} ({entry.about}) ended {status}: {reason}"
    if entry.words is not None:
        assert re.search(entry.words, reason or "", re.IGNORECASE), (
            f"{entry.name} ended {status} for another reason: {reason}"
        )


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_it_gets_its_status(machine, entry):
    machine.ceilings_for(entry.case.dtype)
    record = measure(request_of(entry), machine)
    restore()
    assert_ended(entry, record.status, record.reason)
    assert bool(record.metrics) == (record.status == "ok")


def test_apart_a_process_that_ends_or_is_poisoned_is_replaced(tmp_path, monkeypatch):
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent}")
    good = replace(make_request(HONEST, SHORT, timer="device", also=(), budget_s=0.02), device="cuda")
    jobs: list[tuple[Entry | None, Request]] = [(None, good)]
    for entry in APART:
        jobs += [(entry, request_of(entry)), (None, good)]
    worker = Worker(reuse=True, timeout_s=JOB_LIMIT_S)
    ended = []
    try:
        for index, (entry, request) in enumerate(jobs):
            folder = tmp_path / str(index)
            folder.mkdir()
            (folder / REQUEST_NAME).write_bytes(msgspec.yaml.encode(request))
            worker.submit(folder)
            outcome = worker.wait()
            record = None if outcome.status else read_record(folder)
            status = outcome.status or (record.status if record else "no record")
            ended.append((entry, status, outcome.reason or (record.reason if record else None)))
    finally:
        worker.close()
    for entry, status, reason in ended:
        if entry is None:
            assert status == "ok", (reason, [(one and one.name, how, why) for one, how, why in ended])
        else:
            assert_ended(entry, status, reason)


@pytest.mark.alone
def test_memory_of_another_allocator_can_be_taken_and_given_back():
    """Of `cudaMalloc` the driver knows, and PyTorch's allocator does not: what MemoryOutside holds is not in a peak."""
    torch.cuda.synchronize()
    free, ours = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    library = memory.runtime()
    address = memory.outside(library, memory.OUTSIDE_BYTES)
    taken = free - torch.cuda.mem_get_info()[0]
    unnoticed = torch.cuda.memory_allocated() == ours
    memory.free(library, address)
    assert taken >= memory.OUTSIDE_BYTES and unnoticed


@pytest.mark.alone
def test_memory_of_another_allocator_is_told_and_flagged(machine):
    target = f"{memory.MemoryOutside.__module__}.MemoryOutside"
    record = measure(
        replace(make_request(target, SHORT, timer="device", also=(), budget_s=0.02), device="cuda"), machine
    )
    assert record.status == "ok", record.reason
    for direction in ("forward", "backward"):
        assert memory.OUTSIDE_BYTES <= record.metrics[f"{direction}/outside_memory_bytes"] < 2 * memory.OUTSIDE_BYTES
        assert record.metrics[f"{direction}/peak_memory_bytes"] < memory.OUTSIDE_BYTES
    assert "outside_memory" in record.flags
