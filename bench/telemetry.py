"""python bench/telemetry.py OUT: whether readings beside a timing move it, and what they cost.

One call is timed against itself, in alternate rounds (ABBA): blocks of one rival with NVML's readings beside them,
blocks of the other without, as a duel compares two backends; then both without, to see what equal rivals show. Writes
`telemetry.csv` and `telemetry.txt` into the folder OUT.

On a CPU, where `attn-exp` reads between blocks and not beside them, the reading process asks a stand-in for NVML
(tests/fake_nvml) that needs a millisecond for each answer.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rows import write_rows

from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.stats.paired import MARGIN_FLOOR, compare_all
from attn_exp.core.stats.summary import round_medians
from attn_exp.doctor.bench import attention
from attn_exp.timers import make_timer
from attn_exp.timers.loop import Entry, sample_turns
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.machine.nvml_reader import NvmlReader

ROOT = Path(__file__).resolve().parent.parent
# Batch and length of flash attention with 16 heads of 128: launch-bound, short, long.
SHAPES = {"cuda": ((1, 128), (4, 2048), (8, 8192)), "cpu": ((1, 64), (1, 128))}


@dataclass(frozen=True)
class Row:
    """One comparison of a call with itself; `effect`, `low` and `high` are in percent of its time without readings."""

    batch: int
    length: int
    rivals: str
    time_us: float
    effect: float
    low: float
    high: float
    rounds: int
    verdict: str


@contextlib.contextmanager
def reading(reader: NvmlReader | None) -> Iterator[None]:
    """Have readings taken inside."""
    if reader is None:
        yield
        return
    reader.begin()
    try:
        yield
    finally:
        reader.end()


def compared(machine: Machine, shape: tuple[int, int], reader: NvmlReader | None, rounds: int) -> Row:
    """Time one call against itself: without readings, and with those of `reader`."""
    batch, length = shape
    _, calls = attention(machine.device, batch=batch, length=length)
    timer = "cpu" if machine.gpu is None else "device"

    def entry(of: NvmlReader | None) -> Entry:
        def inside() -> contextlib.ExitStack:
            stack = contextlib.ExitStack()
            stack.enter_context(calls.scope())
            stack.enter_context(reading(of))
            return stack

        return Entry(make_timer(timer, machine.gpu), calls.forward, inside)

    rule = StoppingRule(precision=0.0, min_rounds=rounds, max_rounds=rounds, budget_s=0.0)
    timings = sample_turns([entry(None), entry(reader)], rule)
    medians = [round_medians(timing.times_us, timing.rounds) for timing in timings]
    (found,) = compare_all(medians, MARGIN_FLOOR)
    percent = [100 * value for value in (found.effect, found.low, found.high)]
    kind = "with and without" if reader else "both without"
    return Row(batch, length, kind, statistics.median(medians[0]), *percent, found.rounds, found.verdict)


def cost(reader: NvmlReader, seconds: float) -> str:
    """Return what the readings take: processor time, how long a look lasts, how often the energy moves."""
    pid = reader.pid
    before, began = cpu_s(pid), time.perf_counter()
    reader.begin()
    time.sleep(seconds)
    readings, trouble = reader.end()
    spent = (cpu_s(pid) - before) / (time.perf_counter() - began)
    if trouble or len(readings) < 3:
        return f"no readings: {trouble or len(readings)}"
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(readings)]
    moves = [now.at for before, now in itertools.pairwise(readings) if now.energy_j != before.energy_j]
    steps = [later - earlier for earlier, later in itertools.pairwise(moves)]
    step = f"{1e3 * statistics.median(steps):.1f} ms" if steps else "unknown"
    return (
        f"{len(readings) / seconds:.0f} readings a second (median gap {1e3 * statistics.median(gaps):.1f} ms, longest "
        f"{1e3 * max(gaps):.1f} ms) take {100 * spent:.1f} % of a processor; the energy counter moves every {step}"
    )


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write(rows: Sequence[Row], lines: Sequence[str], out: Path) -> None:
    """Write the rows as CSV, and a table with the lines below."""
    write_rows(out / "telemetry.csv", [asdict(row) for row in rows], digits=6)
    percents = ("effect", "low", "high")
    shown = [
        asdict(row) | {"time_us": f"{row.time_us:.1f}"} | {name: f"{getattr(row, name):+.3f}" for name in percents}
        for row in rows
    ]
    (out / "telemetry.txt").write_text("\n".join([grid(sheet_of(shown)), "", *lines]) + "\n")


def main() -> None:
    """Compare each shape with and without readings, and say what the readings cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    machine = Machine.open("cuda" if torch.cuda.is_available() else "cpu")
    if machine.gpu is None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "fake_nvml"), str(ROOT)])
        os.environ["FAKE_NVML"] = "slow=0.001"
    else:
        machine.ceilings_for("bfloat16")
    reader = NvmlReader(str(machine.environment.get("gpu_uuid", "GPU-0")))
    reader.start()
    time.sleep(2.0)
    rows = []
    for shape in SHAPES[machine.device]:
        # An A/A of equal rivals before and after says what this machine does by itself.
        for used in (None, reader, None):
            rows.append(compared(machine, shape, used, given.rounds))
            print(rows[-1], flush=True)
    name = machine.environment.get("gpu") or machine.environment["cpu"]
    lines = [f"{name}: {cost(reader, 2.0)}"]
    print(lines[0])
    write(rows, lines, given.out)
    reader.stop()


if __name__ == "__main__":
    main()
