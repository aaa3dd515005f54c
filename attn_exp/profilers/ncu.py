"""Profiler `ncu`: Nsight Compute's hardware counters of every kernel, from another run of the worker's command."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from attn_exp.backends.package import Unavailable, WrongOption
from attn_exp.core.errors import how_it_ended
from attn_exp.core.files import write_whole
from attn_exp.core.record.file import LOG_NAME
from attn_exp.core.record.profile import Profile
from attn_exp.core.record.request import REQUEST_NAME
from attn_exp.profilers.base import Subject, kernels_csv
from attn_exp.profilers.ncu_program import NcuError, ask, failure, find_program, plain_environment
from attn_exp.profilers.ncu_table import (
    counters_for,
    kernels,
    known_names,
    own_counter,
    pass_figures,
    read_launches,
    split_passes,
)
from attn_exp.timers.gpu import MARK

_REPORT, _TABLE, _RAW = "report.ncu-rep", "kernels.csv", "launches.csv"
CLOCKS = ("none", "base")
CACHES = ("all", "none")
SETS = ("basic", "detailed", "full", "roofline")


class Ncu:
    """Runs `python -m attn_exp.worker --once` under `ncu`, and turns its counters into a table and metrics.

    This process is idle meanwhile; its GPU memory stays allocated.

    Args:
        name: the profiler's name.
        program: the path of ncu if it is neither on PATH nor in a usual place.
        clock_control: `none` leaves the clocks as during timing, `base` locks them.
        cache_control: `all` empties caches before every kernel and replay, `none` leaves what the previous kernel left.
        metrics: more of ncu's metrics.
        report: whether to keep the `.ncu-rep`.
        section_set: the sections of the report.
    """

    def __init__(
        self,
        name: str,
        program: str | None = None,
        clock_control: str = "none",
        cache_control: str = "all",
        metrics: Sequence[str] = (),
        report: bool = False,
        section_set: str | None = None,
    ) -> None:
        for key, value, choices in (
            ("clock_control", clock_control, CLOCKS),
            ("cache_control", cache_control, CACHES),
            ("section_set", section_set, (None, *SETS)),
        ):
            if value not in choices:
                raise WrongOption(f"{key}={value!r} is not one of {', '.join(map(str, choices))}")
        if isinstance(metrics, str):
            raise WrongOption(f"metrics={metrics!r} is no list: write [{metrics}]")
        self.name, self.program, self.report, self.section_set = name, program, report, section_set
        self.clock_control, self.cache_control, self.metrics = clock_control, cache_control, tuple(metrics)

    def profile(self, subject: Subject) -> Profile:
        """Return counters by kernel and pass.

        Write `kernels.csv`, `launches.csv` with every launch, and the requested report. Raises Unavailable if there is
        no GPU, program or permission, and says what to do; NcuError if the program fails, or its table has none of our
        launches.
        """
        if subject.request.device != "cuda":
            raise Unavailable("ncu reads the counters of NVIDIA GPUs, and this job ran on the CPU: set device=cuda")
        program = find_program(self.program)
        known = known_names(ask(program, "--query-metrics"))
        counters = (*counters_for(known), *(own_counter(name, known) for name in self.metrics))
        text = self._table(program, subject, [counter.metric for counter in counters])
        (subject.folder / _RAW).write_text(text, encoding="utf-8")
        by_pass = split_passes(read_launches(text), subject.request.measuring.passes, MARK)
        profiled = tuple(one for name, own in by_pass.items() for one in kernels(own, name, counters))
        write_whole(subject.folder / _TABLE, kernels_csv(profiled).encode())
        metrics: dict[str, float] = {}
        for name, own in by_pass.items():
            metrics |= pass_figures(own, name, counters)
        nothing = [name for name, own in by_pass.items() if not own]
        return Profile(
            status="failed" if len(nothing) == len(by_pass) else "ok",
            reason=f"ncu saw no kernel of {' and '.join(nothing)}" if nothing else None,
            kernels=profiled,
            metrics=metrics,
            files=subject.kept(_TABLE, _RAW, LOG_NAME, _REPORT),
        )

    def _table(self, program: Path, subject: Subject, metrics: Sequence[str]) -> str:
        """Run the job under the program; return its table of launches as CSV."""
        # A folder of its own with only the request: the job's record stays as it is.
        write_whole(subject.folder / REQUEST_NAME, msgspec.yaml.encode(replace(subject.request, profilers=())))
        report = subject.folder / _REPORT
        try:
            self._collect(program, subject.folder, report, metrics)
            return ask(program, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base")
        finally:
            (subject.folder / REQUEST_NAME).unlink()
            if not self.report:
                report.unlink(missing_ok=True)

    def _collect(self, program: Path, folder: Path, report: Path, metrics: Sequence[str]) -> None:
        """Run the worker's command under the program until it ends or the parent kills this process group."""
        command = [
            *(str(program), "--export", str(report), "--force-overwrite", "--profile-from-start", "off"),
            *("--nvtx", "--clock-control", self.clock_control, "--cache-control", self.cache_control),
            *(("--set", self.section_set) if self.section_set else ()),
            *("--metrics", ",".join(dict.fromkeys(metrics))),
            *(sys.executable, "-m", "attn_exp.worker", "--once", str(folder), "--until", str(os.getpid())),
        ]
        with (folder / LOG_NAME).open("wb") as log:
            log.write(f"{shlex.join(command)}\n".encode())
            log.flush()
            ran = subprocess.run(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False, env=plain_environment()
            )
        # The first line is the command itself.
        output = (folder / LOG_NAME).read_text(encoding="utf-8", errors="replace").partition("\n")[2]
        if ran.returncode < 0:
            raise NcuError(f"ncu {how_it_ended(ran.returncode)}")
        if ran.returncode or not report.exists():
            raise failure(output, ran.returncode)
