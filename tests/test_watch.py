"""Readings beside what is timed: NVML's by a process of its own, the processor's between blocks."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cli
import fakes
import pytest

from attn_exp.core.host import cpu
from attn_exp.core.host.cpu_reader import THROTTLED, CpuReader
from attn_exp.core.host.energy import Reading, moment
from attn_exp.core.record.flags import FLAGS, window_flags
from attn_exp.core.record.window import window_of
from attn_exp.results.result import result_of
from attn_exp.results.table import table
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.nvml_reader import NvmlReader
from attn_exp.worker.machine.watch import Watch
from attn_exp.worker.measure import measure, measure_case

TESTS = Path(__file__).resolve().parent
LIMITS = {"max_sm_clock_mhz": 1980, "power_limit_w": 700.0}
CEILINGS = {"matmul_flops_per_s": 1e12, "copy_bytes_per_s": 1e11}


@pytest.fixture
def nvml_watch(monkeypatch):
    """Makes a watch whose process finds a stand-in for NVML that goes wrong in the given way."""
    readers = []

    def make(how=""):
        path = os.pathsep.join([str(TESTS / "fake_nvml"), str(TESTS.parent)])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("FAKE_NVML", how)
        readers.append(NvmlReader("GPU-1"))
        watch = Watch(readers[-1], limits=LIMITS)
        watch.start()
        return watch

    yield make
    for reader in readers:
        reader.stop()


def watched(watch, seconds=0.4):
    """The window of so many seconds of blocks that follow each other."""
    watch.begin()
    blocks = []
    while not blocks or blocks[-1][1] - blocks[0][0] < seconds:
        began = time.perf_counter()
        time.sleep(0.01)
        blocks.append((began, time.perf_counter()))
        watch.look()
    watch.end()
    spans = tuple((index, moment(begin), moment(end)) for index, (begin, end) in enumerate(blocks))
    return watch.window(fakes.make_timing((seconds * 1e6,), blocks=spans))


def eventually(nvml_watch, how, holds):
    """A watch whose window holds what is asked for, and that window: a busy machine may need several."""
    deadline = time.monotonic() + 240
    while True:
        watch = nvml_watch(how)
        # The first watch begins while the process starts.
        for _ in range(4):
            found = watched(watch)
            if holds(found):
                return watch, found
        assert time.monotonic() < deadline, found


def test_a_process_reads_clock_power_and_energy_beside_the_blocks(nvml_watch):
    # A reader that is interrupted between the counter and the clock is off in one window, not in all.
    def whole(window):
        read = not window.lost and window.energy_from == "counter" and window.reasons == {"sw_power_cap": 1.0}
        return read and window.power_w == pytest.approx(600.0, rel=window.power_error + 0.02)

    _, found = eventually(nvml_watch, "", whole)
    assert (found.source, found.lost, found.note, found.energy_from) == ("nvml", False, "", "counter")
    assert (found.clock_mhz, found.memory_clock_mhz, found.temperature_c) == (1700.0, 3201.0, 61.0)
    assert window_flags(found, 1980) == {"power_capped"}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hangs=0.05", r"no answer for 0\.\d+ s, from 0\.\d+ s after the first call on"),
        ("dies=0.05", r"the process that reads NVML ended"),
        ("back=0.05", r"the energy counter went back"),
        ("none", r"NVML: Driver Not Loaded"),
    ],
)
def test_a_driver_that_hangs_dies_or_jumps_is_flagged_and_nobody_waits_for_it(nvml_watch, how, words):
    watch, found = eventually(nvml_watch, how, lambda window: re.search(words, window.note))
    assert window_flags(found, 1980) >= {"telemetry_lost"}
    # Other processes are tried; then the passes go on without.
    for _ in range(4):
        watch.begin()
        watch.end()


def test_the_process_ends_with_its_worker_even_if_the_driver_hangs(tmp_path):
    program = (
        "import os; from attn_exp.worker.machine.nvml_reader import NvmlReader\n"
        "reader = NvmlReader('GPU-1'); reader.begin()\n"
        "assert reader.pid; os._exit(0)"
    )
    variables = {"PYTHONPATH": os.pathsep.join([str(TESTS / "fake_nvml"), str(TESTS.parent)]), "FAKE_NVML": "hangs=0"}
    marked = os.environ | variables | {"ATTN_EXP_TEST": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=marked, check=True)
    cli.wait_for(lambda: not cli.left_behind(tmp_path))


class Root:
    """A file system as Linux shows a processor with two packages."""

    def __init__(self, path):
        self.path = path
        for number in range(2):
            cpu_folder = path / f"sys/devices/system/cpu/cpu{number}"
            (cpu_folder / "cpufreq").mkdir(parents=True)
            (cpu_folder / f"node{number}").mkdir()
            (cpu_folder / "cpufreq/scaling_governor").write_text("powersave\n")
        self.set(mhz=2400.0)

    def set(self, mhz):
        for number in range(2):
            folder = self.path / f"sys/devices/system/cpu/cpu{number}"
            (folder / "cpufreq/scaling_cur_freq").write_text(f"{mhz * 1e3:.0f}\n")


def test_the_processors_clock_is_the_mean_of_its_cores(tmp_path):
    root = Root(tmp_path)
    reader = CpuReader({0, 1}, tmp_path)
    assert reader.shows
    reader.begin()
    root.set(2600.0)
    reader.look()
    readings, trouble = reader.end()
    assert trouble == ""
    assert [one.clock_mhz for one in readings] == [2400.0, 2600.0]


def test_a_throttled_processor_is_seen(tmp_path):
    Root(tmp_path)
    folder = tmp_path / "sys/devices/system/cpu/cpu0/thermal_throttle"
    folder.mkdir()
    (folder / "package_throttle_count").write_text("7\n")
    reader = CpuReader({0}, tmp_path)
    reader.begin()
    (folder / "package_throttle_count").write_text("8\n")
    reader.look()
    reader.look()
    readings, _ = reader.end()
    assert [bool(one.reasons) for one in readings] == [False, True, False]
    window = window_of("linux", [(readings[0].at, readings[-1].at)], 0.1, readings, watched=(0.0, 1.0))
    assert window_flags(window, None) == {"thermal"}


def test_linux_names_governor_nodes_and_instruction_sets(tmp_path):
    Root(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name\t: A CPU\nflags\t\t: fpu sse4_2 smep avx2 amx_bf16 sme2 fma\n")
    device = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert cpu.cpu_name(tmp_path) == "A CPU"
    assert cpu.instruction_sets(tmp_path) == "amx_bf16 avx2 fma sme2 sse4_2"
    assert cpu.governor({0, 1}, tmp_path) == "powersave"
    assert (cpu.numa_nodes({0, 1}, tmp_path), cpu.numa_nodes({1}, tmp_path)) == ("0-1", "1")
    assert cpu.numa_node_of_device("00000000:19:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert cpu.numa_node_of_device("00000000:19:00.0", tmp_path) is None
    empty = tmp_path / "empty"
    assert (cpu.governor({0}, empty), cpu.numa_nodes({0}, empty), cpu.instruction_sets(empty)) == (None, None, None)
    assert cpu.ranges([5, 0, 1, 2, 8]) == "0-2,5,8"


class Steady:
    """A reader of a processor with a known power and clock: a reading at each look, and each `every_s` before it."""

    source, every_s = "linux", 0.005

    def __init__(self):
        self.readings, self.read_until = [], 0.0

    def start(self):
        pass

    def begin(self):
        self.readings, self.read_until = [], time.perf_counter()

    def look(self):
        now = time.perf_counter()
        while self.read_until < now:
            at = self.read_until = min(self.read_until + self.every_s, now)
            self.readings.append(Reading(at=moment(at), clock_mhz=3000.0, energy_j=50.0 * at, energy_at=moment(at)))

    def end(self):
        return self.readings, ""


def machine_with(watch):
    return Machine("cpu", ceilings={"float32": CEILINGS}, watch=watch)


def test_a_measured_job_has_a_window_for_each_pass_with_power_and_joules_a_call():
    request = fakes.make_request(min_rounds=40, max_rounds=40, budget_s=1.0)
    # Long enough that calls take most of the window, and so short that a block has many.
    request = replace(request, case=replace(request.case, q_heads=4, kv_heads=4, q_len=128, kv_len=128))
    record = measure(request, machine_with(Watch(Steady(), limits={})))
    assert record.status == "ok", record.reason
    for direction in ("forward", "backward"):
        window = record.passes[direction].window
        metrics = {
            name.partition("/")[2]: value for name, value in record.metrics.items() if name.startswith(direction)
        }
        assert window.power_w == pytest.approx(50.0, rel=0.01), window
        assert metrics["joules_per_call"] == pytest.approx(window.power_w * metrics["time_us"] / 1e6)
        assert metrics["tflops_per_watt"] == pytest.approx(metrics["tflops"] / window.power_w)
        assert (metrics["clock_mhz"], metrics["power_error"]) == (3000.0, window.power_error)


class Troubled(Steady):
    """Goes wrong for good in the midst of what is watched: a clock that `jumps`, a `hot` processor, or `silent`."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def end(self):
        # The last ones are always of blocks, whatever the warm-up took.
        before, after = self.readings[:-3], self.readings[-3:]
        if self.how == "silent":
            return before, "the processor's frequency can no longer be read"
        odd = {"jumps": {"clock_mhz": 2000.0}, "hot": {"reasons": (THROTTLED,)}}[self.how]
        return [*before, *(replace(one, **odd) for one in after)], ""


@pytest.mark.parametrize(("how", "flag"), [("jumps", "clock_jump"), ("hot", "thermal"), ("silent", "telemetry_lost")])
def test_a_disturbance_amid_a_pass_is_a_flag_of_the_record(how, flag):
    request = fakes.make_request(passes=("forward",), precision=1e-9, min_rounds=20, max_rounds=40)
    record = measure(request, machine_with(Watch(Troubled(how), limits={})))
    assert record.status == "ok", record.reason
    assert flag in record.flags and flag in record.passes["forward"].flags
    # A precision that cannot be reached ends with the budget, as far as it got.
    assert record.passes["forward"].timings[0].stop_reason in ("budget", "max_rounds")
    assert (f" {flag}: " in " ".join(table([result_of(record)]).split())) is bool(FLAGS[flag][0])


def test_rivals_of_a_duel_have_windows_of_their_own_blocks():
    first, second = measure_case(
        [replace(fakes.make_request(passes=("forward",)), job=f"fake-{name}") for name in "ab"],
        machine_with(Watch(Steady(), limits={})),
    )
    windows = [record.passes["forward"].window for record in (first, second)]
    assert [window.clock_mhz for window in windows] == [3000.0, 3000.0]
    blocks = [record.passes["forward"].timings[0].blocks for record in (first, second)]
    assert [window.seconds for window in windows] == pytest.approx(
        [sum(e - b for _, b, e in some) for some in blocks], abs=1e-5
    )


def test_a_machine_that_shows_nothing_says_so_in_the_record():
    record = measure(fakes.make_request(passes=("forward",)), machine_with(Watch(None, "Linux shows nothing")))
    assert (record.status, record.passes["forward"].window.note) == ("ok", "Linux shows nothing")
    assert not {"forward/joules_per_call", "forward/power_w", "forward/clock_mhz"} & set(record.metrics)
