"""Readings beside what is timed: NVML's by a process of its own, the processor's between blocks."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fakes
import pytest

from attn_exp.core import cpu
from attn_exp.core.cpu_reader import THROTTLED, CpuReader
from attn_exp.core.energy import Reading
from attn_exp.core.flags import FLAGS, window_flags
from attn_exp.core.moment import moment
from attn_exp.core.window import window_of
from attn_exp.results.result import result_of
from attn_exp.results.table import table
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.nvml_reader import NvmlReader
from attn_exp.worker.machine.watch import Watch, watch_cpu
from attn_exp.worker.measure import measure, measure_interleaved

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
        time.sleep(0.3)  # a worker's start takes seconds
        return watch

    make.readers = readers
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


def test_a_process_reads_clock_power_and_energy_beside_the_blocks(nvml_watch):
    watch = nvml_watch()
    found = watched(watch)
    assert (found.source, found.lost, found.note, found.energy_from) == ("nvml", False, "", "counter")
    assert (found.clock_mhz, found.memory_clock_mhz, found.temperature_c) == (1700.0, 3201.0, 61.0)
    assert found.power_w == pytest.approx(600.0, rel=found.power_error + 0.02)
    assert found.reasons == {"sw_power_cap": 1.0}
    assert window_flags(found, 1980) == {"power_capped"}
    # The next pass has readings of its own, and between passes nothing is read.
    time.sleep(0.1)
    again = watched(watch, 0.2)
    assert 10 < again.readings < found.readings


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
    watch = nvml_watch(how)
    began = time.perf_counter()
    found = watched(watch)
    assert time.perf_counter() - began < 0.4 + 0.5
    assert re.search(words, found.note), found.note
    assert window_flags(found, 1980) >= {"telemetry_lost"}
    # Other processes are tried; then the passes go on without.
    for _ in range(4):
        began = time.perf_counter()
        watch.begin()
        watch.end()
        assert time.perf_counter() - began < 0.5


def test_a_pass_that_ends_before_the_first_answer_costs_no_process(nvml_watch):
    watch = nvml_watch("slow=0.02")
    (reader,) = nvml_watch.readers
    process = reader.pid
    for _ in range(5):
        found = watched(watch, 0.01)
        assert (found.readings, found.lost) == (0, False)
    time.sleep(0.1)
    assert reader.pid == process > 0
    assert watched(watch).clock_mhz == 1700.0


def test_slow_answers_are_no_loss(nvml_watch):
    found = watched(nvml_watch("slow=0.003"))
    assert (found.lost, found.clock_mhz) == (False, 1700.0)


def test_the_process_ends_with_its_worker_even_if_the_driver_hangs(tmp_path):
    program = (
        "import os, time; from attn_exp.worker.machine.nvml_reader import NvmlReader\n"
        "reader = NvmlReader('GPU-1'); reader.begin(); time.sleep(0.6)\n"
        "print(reader.pid, flush=True); os._exit(0)"
    )
    variables = {"PYTHONPATH": os.pathsep.join([str(TESTS / "fake_nvml"), str(TESTS.parent)]), "FAKE_NVML": "hangs=0"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    deadline = time.monotonic() + 5
    while Path(f"/proc/{int(ran.stdout)}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{int(ran.stdout)}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    assert time.monotonic() < deadline


class Root:
    """A file system as Linux shows a processor with two packages."""

    def __init__(self, path):
        self.path = path
        for number in range(2):
            cpu_folder = path / f"sys/devices/system/cpu/cpu{number}"
            (cpu_folder / "cpufreq").mkdir(parents=True)
            (cpu_folder / f"node{number}").mkdir()
            (cpu_folder / "cpufreq/scaling_governor").write_text("powersave\n")
            zone = path / f"sys/class/powercap/intel-rapl:{number}"
            zone.mkdir(parents=True)
            (zone / "name").write_text(f"package-{number}\n")
            (zone / "max_energy_range_uj").write_text("262143328850\n")
        self.set(mhz=2400.0, joules=(10.0, 20.0))

    def set(self, mhz, joules):
        for number, energy in enumerate(joules):
            folder = self.path / "sys"
            (folder / f"devices/system/cpu/cpu{number}/cpufreq/scaling_cur_freq").write_text(f"{mhz * 1e3:.0f}\n")
            (folder / f"class/powercap/intel-rapl:{number}/energy_uj").write_text(f"{energy * 1e6:.0f}\n")


def test_the_processors_energy_is_that_of_all_packages_and_its_counters_begin_again(tmp_path):
    root = Root(tmp_path)
    reader = CpuReader({0, 1}, tmp_path)
    assert (reader.shows, reader.missing) == (True, "")
    reader.begin()
    root.set(2600.0, (10.5, 20.25))
    reader.look()
    root.set(2800.0, (0.5, 20.5))  # the first one began again after 262,143 J
    reader.look()
    readings, trouble = reader.end()
    assert trouble == ""
    energies = [one.energy_j for one in readings]
    assert energies[1] - energies[0] == pytest.approx(0.75)
    assert energies[2] - energies[1] == pytest.approx(262143.32885 - 10.0 + 0.25)
    assert [one.clock_mhz for one in readings] == [2400.0, 2600.0, 2800.0]


def test_a_processor_that_stops_telling_is_flagged(tmp_path):
    root = Root(tmp_path)
    reader = CpuReader({0}, tmp_path)
    reader.begin()
    (root.path / "sys/class/powercap/intel-rapl:0/energy_uj").write_text("\n")
    reader.look()
    assert reader.end()[1] == "the processor's energy can no longer be read"
    (root.path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").unlink()
    reader.look()
    assert reader.end()[1] == "the processor's frequency can no longer be read"


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


def test_energy_that_only_root_may_read_is_told_apart_from_none(tmp_path):
    assert CpuReader({0}, tmp_path).missing == "Linux shows no energy of this processor (RAPL)"
    root = Root(tmp_path)
    for number in range(2):
        (root.path / f"sys/class/powercap/intel-rapl:{number}/energy_uj").unlink()
    assert CpuReader({0}, tmp_path).missing == "this processor's energy (RAPL) is readable by root only"


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

    source, late_s, every_s = "linux", 0.001, 0.005

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
    # Long enough that calls take most of the window, whatever else the machine does.
    request = replace(request, case=replace(request.case, q_heads=4, kv_heads=4, q_len=512, kv_len=512))
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
    assert record.passes["backward"].rest_s > 0


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
def test_what_goes_wrong_amid_a_pass_is_a_flag_of_the_record_and_a_mark_in_its_table(how, flag):
    request = fakes.make_request(passes=("forward",), precision=1e-9, min_rounds=20, max_rounds=40, patience_s=0.3)
    record = measure(request, machine_with(Watch(Troubled(how), limits={})))
    assert record.status == "ok", record.reason
    assert flag in record.flags and flag in record.passes["forward"].flags
    # A precision that cannot be reached ends with the budget, as far as it got.
    assert record.passes["forward"].timings[0].stop_reason in ("budget", "max_rounds")
    assert f"{FLAGS[flag][0]} {flag}: " in " ".join(table([result_of(record)]).split())


def test_rivals_of_a_duel_have_windows_of_their_own_blocks():
    first, second = measure_interleaved(
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


def test_the_watch_of_this_machine_reads_what_linux_shows_or_says_that_it_shows_none():
    watch = watch_cpu()
    found = watched(watch, 0.05)
    files = [Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"), Path("/sys/class/powercap/intel-rapl:0")]
    assert (found.source == "none") == (not any(file.exists() for file in files))
    assert found.note or found.power_w
