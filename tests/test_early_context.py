"""A worker's first line is read at once, so that its GPU is opened while torch is being imported."""

import ctypes
import io
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import msgspec
import pytest
from fakes import make_request

from attn_exp.core.request import REQUEST_NAME, read_requests
from attn_exp.worker.machine import early_context
from attn_exp.worker.machine.early_context import create_context, lines_of_input

ON_GPU = replace(make_request(), device="cuda", gpu_uuid="GPU-7")


class Driver:
    """A CUDA driver that notes what it is asked, and what it would see when it is initialised."""

    def __init__(self, code=0):
        self.asked, self.visible, self.code = [], None, code

    def cuInit(self, flags):
        self.asked.append("init")
        self.visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self.code

    def cuDeviceGet(self, device, ordinal):
        self.asked.append(f"device {ordinal}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.asked.append("context")
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "other")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    return found


def test_the_context_is_that_of_the_leased_gpu(driver):
    create_context(ON_GPU)
    assert driver.visible == "GPU-7"
    assert driver.asked == ["init", "device 0", "context"]


def test_no_driver_is_asked_for_a_job_of_the_cpu_or_without_a_lease(driver):
    for request in (make_request(), replace(ON_GPU, gpu_uuid=None)):
        create_context(request)
    assert driver.asked == [] and os.environ["CUDA_VISIBLE_DEVICES"] == "other"


def test_a_driver_that_cannot_be_initialised_is_asked_nothing_more(driver):
    driver.code = 100
    create_context(ON_GPU)
    assert driver.asked == ["init"]


def test_the_driver_is_not_asked_before_torch_s_libraries_are_loaded(monkeypatch, tmp_path):
    (tmp_path / REQUEST_NAME).write_bytes(msgspec.yaml.encode(ON_GPU))
    asked, loaded = threading.Event(), "a module that is imported later"
    monkeypatch.setattr(early_context, "create_context", lambda request: asked.set())
    monkeypatch.setattr(early_context, "_BEHIND_LIBRARIES", loaded)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{json.dumps(str(tmp_path))}\n"))
    assert len(list(lines_of_input())) == 1
    assert not asked.wait(0.05)
    monkeypatch.setitem(sys.modules, loaded, sys)
    assert asked.wait(20)


def test_the_awaited_module_comes_behind_torch_s_libraries():
    code = "import sys, torch; names = [*sys.modules]; print(names.index('torch._C') < names.index('torch.overrides'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
    assert early_context._BEHIND_LIBRARIES == "torch.overrides"


def test_all_lines_arrive_whatever_the_first_one_leads_to(monkeypatch, tmp_path):
    (tmp_path / REQUEST_NAME).write_bytes(msgspec.yaml.encode(ON_GPU))
    tried = threading.Event()

    def fails(request):
        assert request.gpu_uuid == "GPU-7"
        tried.set()
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(early_context, "create_context", fails)
    first = json.dumps(str(tmp_path))
    for text in (f"{first}\n", f"{first}\nsecond\nthird\n", "no folder\nsecond\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert list(lines_of_input()) == text.splitlines(keepends=True)
    assert tried.wait(20)


def test_no_two_threads_decode_at_a_time(tmp_path, monkeypatch):
    """Of a type that another thread is decoding for the first time, msgspec knows half, and the process dies of it."""
    (tmp_path / REQUEST_NAME).write_bytes(msgspec.yaml.encode(make_request()))
    both = threading.Barrier(2)
    decode, together = msgspec.yaml.decode, []

    def slow(*given, **named):
        try:
            both.wait(0.3)
            together.append(True)
        except threading.BrokenBarrierError:
            pass
        return decode(*given, **named)

    monkeypatch.setattr(msgspec.yaml, "decode", slow)
    threads = [threading.Thread(target=read_requests, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == []
