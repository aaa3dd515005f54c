"""Profiler `ncu`: Nsight Compute's hardware counters of every kernel, from another run of the worker's command."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attn_exp.backends.package import Unavailable, WrongOption
from attn_exp.core.errors import how_it_ended
from attn_exp.core.files import write_whole
from attn_exp.core.profile import Profile
from attn_exp.core.record_file import LOG_NAME
from attn_exp.core.request import REQUEST_NAME
from attn_exp.profilers.base import Subject
from attn_exp.profilers.figures_csv import kernels_csv
from attn_exp.profilers.ncu_csv import CsvError, read_launches
from attn_exp.profilers.ncu_metrics import Counter, counters_for, known_names, own_counter
from attn_exp.profilers.ncu_program import NcuError, ask, check_version, failure, find_program, plain_environment
from attn_exp.profilers.ncu_table import kernels, pass_figures, split_passes
from attn_exp.timers.gpu import MARK

_REPORT, _TABLE, _RAW = "report.ncu-rep", "kernels.csv", "launches.csv"
CLOCKS = ("none", "base")
CACHES = ("all", "none")
SETS = ("basic", "detailed", "full", "roofline")


@dataclass(frozen=True)
class _Seen:
    """The result of a run of the program: its table of launches as CSV, and the counters that were requested."""

    text: str
    counters: tuple[Counter, ...]


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

        Write `kernels.csv`, `launches.csv` with every launch, and the requested report.

        Raises:
            Unavailable: there is no GPU, program or permission, or the version is too old; the message says what to do.
        """
        if subject.request.device != "cuda":
            raise Unavailable("ncu reads the counters of NVIDIA GPUs, and this job ran on the CPU: set device=cuda")
        try:
            seen = self._run(subject)
        except NcuError as error:
            if error.remedied:
                raise Unavailable(str(error)) from error
            return Profile(status="failed", reason=str(error), files=subject.kept(LOG_NAME))
        (subject.folder / _RAW).write_text(seen.text, encoding="utf-8")
        files = (_TABLE, _RAW, LOG_NAME, *((_REPORT,) if self.report else ()))
        try:
            launches = read_launches(seen.text)
            by_pass = split_passes(launches, subject.request.measuring.passes, MARK)
        except CsvError as error:
            return Profile(status="failed", reason=str(error), files=subject.kept(*files))
        profiled = tuple(one for name, own in by_pass.items() for one in kernels(own, name, seen.counters))
        write_whole(subject.folder / _TABLE, kernels_csv(profiled).encode())
        metrics: dict[str, float] = {}
        for name, own in by_pass.items():
            metrics |= pass_figures(own, name, seen.counters)
        nothing = [name for name, own in by_pass.items() if not own]
        reason = f"ncu saw no kernel of {' and '.join(nothing)}" if nothing else None
        return Profile(
            status="failed" if len(nothing) == len(by_pass) else "ok",
            reason=reason,
            kernels=profiled,
            metrics=metrics,
            files=subject.kept(*files),
        )

    def _run(self, subject: Subject) -> _Seen:
        program = find_program(self.program)
        check_version(program)
        counters = self._counters(program)
        # A folder of its own with only the request: the job's record stays as it is.
        write_whole(subject.folder / REQUEST_NAME, msgspec.yaml.encode(replace(subject.request, profilers=())))
        report = subject.folder / _REPORT
        try:
            self._collect(program, subject.folder, report, [one.metric for one in counters])
            text = ask(program, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base")
        finally:
            (subject.folder / REQUEST_NAME).unlink(missing_ok=True)
            if not self.report:
                report.unlink(missing_ok=True)
        return _Seen(text, counters)

    def _counters(self, program: Path) -> tuple[Counter, ...]:
        try:
            known = known_names(ask(program, "--query-metrics"))
        except NcuError as error:
            if error.remedied:
                raise
            known = frozenset()
        return (*counters_for(known), *(own_counter(name, known) for name in self.metrics))

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
            raise NcuError(f"ncu {how_it_ended(ran.returncode)}", remedied=False)
        if ran.returncode or not report.exists():
            raise failure(output, ran.returncode)
