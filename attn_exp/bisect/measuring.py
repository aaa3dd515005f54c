"""Measure two versions side by side: worker processes that take turns, and rounds that survive a restart."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.bisect.search import Round
from attn_exp.bisect.versions import NotInstallable, Packages
from attn_exp.core.errors import UserError
from attn_exp.core.files import write_whole
from attn_exp.core.record.file import read_record
from attn_exp.core.record.request import REQUEST_NAME, Request
from attn_exp.core.stats.paired import abba_order
from attn_exp.execution.worker import Worker

STATE = "state.json"
_TIMEOUT_S = 600.0
# The addresses of a process's memory make its calls faster or slower by nearly 1 %: each round has processes of its
# own, so that the spread of the rounds contains that.
ROUNDS_OF_A_PROCESS = 1
# The metric of a job that counts.
METRIC = "time_us"


class Side:
    """One version's worker, which measures the case, and the canary if there is one."""

    def __init__(self, python: str, folder: Path, requests: Mapping[str, Request]) -> None:
        self.worker = Worker(reuse=True, timeout_s=_TIMEOUT_S, python=python)
        self._folder = folder
        for name, request in requests.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_whole(folder / name / REQUEST_NAME, msgspec.yaml.encode(request))

    def time(self, name: str, direction: str) -> float:
        """Measure once and return microseconds. Raises NotInstallable with the reason if the job is not ok."""
        self.worker.submit(self._folder / name)
        outcome = self.worker.wait()
        if outcome.status is not None:
            raise NotInstallable(f"{outcome.status}: {outcome.reason}")
        record = read_record(self._folder / name)
        if record is None or record.status != "ok":
            raise NotInstallable("no record" if record is None else f"{record.status}: {record.reason}")
        return record.metrics[f"{direction}/{METRIC}"]


class SideBySide:
    """Measures versions against the good one in rounds, and keeps them in a folder's `state.json`.

    The `requests` are the job of the case by the name `case`, and that of the canary by `canary`. A folder with rounds
    goes on. Raises UserError if those are about another `question`, or cannot be read.
    """

    def __init__(
        self,
        versions: Packages,
        requests: Mapping[str, Request],
        direction: str,
        folder: Path,
        question: Mapping[str, Any],
    ) -> None:
        self._versions = versions
        self._requests = requests
        self._direction = direction
        self._folder = folder
        self._sides: dict[int, Side] = {}
        self._state: dict[str, Any] = {"question": dict(question), "rounds": {}, "skipped": {}}
        path = folder / STATE
        if path.exists():
            try:
                self._state = json.loads(path.read_text())
            except ValueError as error:
                raise UserError(f"{path} is no state of a bisection: remove it") from error
            if self._state["question"] != question:
                raise UserError(f"{folder} has a bisection of something else: choose another state=FOLDER")

    def measure(self, index: int, rounds: int) -> list[Round] | str:
        """Return at least so many rounds of a version, or why it cannot be measured."""
        name = self._versions.names[index]
        if name in self._state["skipped"]:
            return str(self._state["skipped"][name])
        kept: list[list[float | None]] = self._state["rounds"].setdefault(name, [])
        try:
            while len(kept) < rounds:
                kept.append(self._round(index, len(kept)))
                self._keep()
        except NotInstallable as error:
            if error.good_end:
                raise UserError(f"the good end cannot be measured: {error}") from error
            self._state["skipped"][name] = str(error)
            self._keep()
            return str(error)
        return [Round(float(one[0] or 0.0), one[1]) for one in kept]

    def close(self) -> None:
        """End all workers."""
        for side in self._sides.values():
            side.worker.close()
        self._sides.clear()

    def _keep(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / STATE, json.dumps(self._state, indent=1).encode())

    def _round(self, index: int, number: int) -> list[float | None]:
        """Measure one round of both sides in the order ABBA; return the log ratios of the case and of the canary."""
        # At most the good one and this one have workers, and memory on the GPU.
        if number % ROUNDS_OF_A_PROCESS == 0 or index not in self._sides:
            self.close()
        times: dict[tuple[str, int], float] = {}
        for position in abba_order(2, number):
            which = (0, index)[position]
            try:
                side = self._side(which)
                for name in self._requests:
                    times[name, which] = side.time(name, self._direction)
            except NotInstallable as error:
                error.good_end = which == 0
                if which in self._sides:
                    self._sides.pop(which).worker.close()
                raise
        ratios = {name: math.log(times[name, index] / times[name, 0]) for name in self._requests}
        return [ratios.get("case"), ratios.get("canary")]

    def _side(self, which: int) -> Side:
        if which not in self._sides:
            python = self._versions.environment(which, self._folder / "environments")
            place = self._folder / "jobs" / str(which)
            requests = {
                name: replace(request, label=self._versions.label(which)) for name, request in self._requests.items()
            }
            self._sides[which] = Side(python, place, requests)
        return self._sides[which]
