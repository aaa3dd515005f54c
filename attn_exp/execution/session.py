"""The session of one `attn-exp run`: it runs jobs case after case, and keeps and logs their records."""

import contextlib
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attn_exp.config.compose import resolved_config
from attn_exp.config.overrides import override_key
from attn_exp.config.request import request_from_config
from attn_exp.core.errors import UserError
from attn_exp.core.files import hidden_files, remove_litter
from attn_exp.core.host.nvml import visible_gpus
from attn_exp.core.live_line import LiveLine
from attn_exp.core.record.record import METHOD_VERSION, Record
from attn_exp.core.record.request import Measuring, Request
from attn_exp.core.redaction import redacted
from attn_exp.core.source import described, identity
from attn_exp.execution.closing import End, Output
from attn_exp.execution.context import SweepContext, open_context
from attn_exp.execution.isolation import RunFolder
from attn_exp.execution.job_queue import JobQueue
from attn_exp.execution.progress import Progress
from attn_exp.execution.worker import Worker
from attn_exp.results.read import read_folder
from attn_exp.results.store import done_record, keep_planned
from attn_exp.tracking.base import EndStatus

_KEPT_AT_ONCE = 100


class Session:
    """Runs the jobs of one `attn-exp run` case after case, and keeps their records.

    Args:
        arguments: the command line as typed, for `command.txt` and for the command that finishes the sweep.
        worker: used if the configuration asks for a warm one; it may have been started already.
        run_folder: measures jobs in this process, for `isolation=none`.
        each: called with the record of each job that has ended or was done before, and the job's folder. Nothing is
            printed on standard output then.

    Attributes:
        ahead: the number of cases that may be queued behind the one that is measured.
        context: the folder, tracker, GPU and worker of the sweep; None until its first job.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        worker: Worker | None = None,
        run_folder: RunFolder | None = None,
        line: LiveLine | None = None,
        each: Callable[[Record, Path], None] | None = None,
    ) -> None:
        self.status: EndStatus = "FINISHED"
        # How many jobs ended without a result that another attempt may bring.
        self.lost = 0
        # Whether no job of the sweep has a number, and one was not unsupported; or the store lacks something.
        self.no_number = self.not_stored = False
        # The source of each backend, by its class, as the sweep began with it.
        self._sources: dict[str, dict[str, str]] = {}
        self.progress = Progress(line=line)
        self.ahead = 0
        self.gpus = visible_gpus()
        self.context: SweepContext | None = None
        self.impossible: list[str] = []
        self._arguments = arguments
        self._worker = worker
        self._run_folder = run_folder
        self._each = each
        self._output = Output()
        self._queue: JobQueue | None = None
        # The fastest job of each case that has a record, and its time.
        self._fastest: dict[Any, tuple[float, str, str | None]] | None = None

    def request(self, config: DictConfig) -> Request:
        """Return the request that a composed configuration describes. Raises UserError."""
        return request_from_config(resolved_config(config, self._arguments), self.gpus)

    def submit(self, requests: Sequence[Request], config: Callable[[], DictConfig]) -> float:
        """Queue the jobs of one case, and return as soon as no more than `ahead` cases are waiting.

        Those that have no record are measured in turns, beside the fastest that has one. `config` composes the
        configuration of the first. It is called for the first jobs only, since all jobs of a sweep share their folder,
        tracker and isolation. Returned is the sum of the passes' median times of the last job in microseconds, for
        sweepers that optimise; infinity if there is none, or none yet. Raises UserError if the jobs cannot be measured
        as typed.
        """
        if self._queue is None:
            opened = self.open(config())
            isolation = opened.start(requests[0].device, self.gpus, worker=self._worker, run_folder=self._run_folder)
            self._queue = JobQueue(isolation, opened.folder, opened.gpu_uuid)
        queue, context = self._queue, self.opened
        if any(queue.has(request.job) for request in requests):
            # Two combinations of choices may be the same job: the second one uses the first one's record.
            self._await(queue, 0)
        done, left = None, list[Request]()
        for request in requests:
            done = done_record(request, context.folder / request.job)
            if done is None:
                left.append(request)
            else:
                self.keep(done, request)
        if not left:
            return _objective(done)
        self._check_sources(left)
        if left[0].device == "cpu":
            # Nothing of ours may run while the CPU is measured.
            context.tracker.quiet()
        with self.writing():
            queue.submit(left, self._beside(left))
        self.progress.running(queue.oldest.label)
        return _objective(self._await(queue, self.ahead if left[0].device == "cuda" else 0))

    def _check_sources(self, requests: Sequence[Request]) -> None:
        """Raise UserError if a backend's files were written since the sweep began: the rest would be of another one."""
        for request in requests:
            target = str(request.backend["_target_"])
            if self._sources.setdefault(target, identity(request.source)) != identity(described(target)):
                raise UserError(
                    f"the files of backend {request.backend['name']} were changed while the sweep ran, which ends: "
                    f"measure the present ones with: {self.resume_command()}"
                )

    def _beside(self, requests: Sequence[Request]) -> str | None:
        """Return the name of the fastest job of this case that was measured here before, on the same card.

        None if it is one of these, which is measured again for its profiles.
        """
        if self._fastest is None:
            self._fastest = {}
            for done in read_folder(self.opened.folder, may_be_empty=True).results:
                if done.status == "ok" and done.method_version == METHOD_VERSION:
                    key = done.device, done.case, done.measuring
                    self._note(key, done.job, done.environment.get("gpu_uuid"), _time_us(done.metrics, done.measuring))
        _, job, gpu_uuid = self._fastest.get(requests[0].turns_key, (math.inf, None, None))
        same_card = gpu_uuid == self.opened.gpu_uuid
        return job if same_card and all(request.job != job for request in requests) else None

    def _note(self, key: Any, job: str, gpu_uuid: str | None, time_us: float) -> None:
        """Note a job that has a record if it is the fastest of its case."""
        if self._fastest is not None and time_us < self._fastest.get(key, (math.inf, None, None))[0]:
            self._fastest[key] = time_us, job, gpu_uuid

    def _note_record(self, record: Record) -> None:
        if record.method_version == METHOD_VERSION:
            self._note(record.request.turns_key, record.request.job, record.request.gpu_uuid, _objective(record))

    def say(self, text: str) -> None:
        """Print a line: beside results for programs, on standard error."""
        (self.progress.say if self._output.format == "table" and self._each is None else self.progress.note)(text)

    def drain(self) -> None:
        """Wait for all queued jobs."""
        if self._queue is not None:
            self._await(self._queue, 0)

    def keep(self, record: Record, request: Request) -> None:
        """Count a job that is done already, and log it if the tracker does not have it. `stop_on` may end the sweep."""
        self.progress.keep()
        self._note_record(record)
        self.log(record)
        if self.progress.kept % _KEPT_AT_ONCE == 0:
            # Records queue up in memory, with all of their samples, while the store is still being opened.
            self.opened.tracker.settle()
        # With the present `stop_on`: the same command ends where it ended before.
        self.halt(replace(record, request=request))

    def close(self, status: EndStatus) -> None:
        """End the session: kill jobs that still run, write the tables, and close the tracker."""
        try:
            self._close(status)
        finally:
            self.progress.line.close()

    def _close(self, status: EndStatus) -> None:
        context = self.context
        if context is not None:
            self.progress.line.show("ending")
        if self._worker is not None and context is not None and status == "FINISHED":
            # Waited for below: a process takes a while to give a GPU's memory back, and there are plots to draw.
            self._worker.interrupt()
        else:
            self._stop()
        if context is None:
            return
        try:
            if context.folder.is_dir():
                end = End(
                    context=context,
                    progress=self.progress,
                    output=self._output,
                    say=self.say,
                    resume=self.resume_command(),
                    prints=self._each is None,
                    impossible=self.impossible,
                    aside=self._queue.aside if self._queue is not None else (),
                )
                self.no_number, self.not_stored = end.finish(status)
            else:
                # Nothing is left to count and to draw.
                self.no_number = True
                context.tracker.close("FAILED")
        except KeyboardInterrupt:
            context.abandon("KILLED")
            if (command := context.tracker.replay_command()) is not None:
                self.say(f"stopped while the sweep's end was stored; what is missing is stored with: {command}")
            raise
        except Exception:
            # Queued records are still stored, and no run is left RUNNING.
            context.tracker.close("FAILED")
            raise
        finally:
            self._stop()
            remove_litter([*hidden_files(context.folder), *Path(tempfile.gettempdir()).glob("attn_exp_*")])
            context.exclusive.close()

    def _stop(self) -> None:
        """Kill what still runs, wait for its end, and release the GPU."""
        if self._worker is not None:
            self._worker.close()
        if self.context is not None:
            self.context.stop()

    def open(self, config: DictConfig) -> SweepContext:
        """Return the context, which the first call opens. Raises UserError for mistakes, before any work."""
        if self.context is None:
            options = resolved_config(config, self._arguments)
            self._output, self.progress.line.quiet = Output.of(options), options["quiet"]
            command = _command(self._arguments)
            self.context = open_context(options, command, self.progress.note, run_folder=self._run_folder)
            keep_planned(self.context.folder, self.progress.total)
        return self.context

    def resume_command(self) -> str:
        """Return the command that finishes this sweep."""
        if self._arguments[:1] == ["reproduce"]:
            # It names its sweep itself; its `sweep=` is one that exists.
            return _command(self._arguments)
        words = [argument for argument in self._arguments if override_key(argument) != "sweep"]
        return _command([*words, f"sweep={self.opened.name}"])

    @property
    def opened(self) -> SweepContext:
        """The context of a sweep that is open."""
        assert self.context is not None
        return self.context

    def _await(self, queue: JobQueue, ahead: int) -> Record | None:
        """Wait until no more than `ahead` cases are queued; return the last record. `stop_on` may end the sweep."""
        record = None
        while queue.waiting > ahead:
            # Rivals that were measured in turns are kept whole before a sweep ends.
            ended, waiting = list[Record](), queue.waiting
            while queue.waiting == waiting:
                rivals = len(queue.in_turns) - 1
                with self.writing():
                    record = queue.record(queue.wait(self._stage))
                self.finish(record, rivals)
                ended.append(record)
            if queue.waiting:
                self.progress.running(queue.oldest.label)
            for done in ended:
                self.halt(done)
        return record

    def _stage(self, stage: str, folder: Path | None) -> None:
        """Show what is done, and of which of several jobs."""
        assert self._queue is not None
        jobs = self._queue.in_turns
        name = "" if len(jobs) < 2 else f"{len(jobs)} in turns" if folder is None else jobs.get(folder.name, "")
        self.progress.line.stage(f"{stage} {name}".rstrip())

    def finish(self, record: Record, rivals: int = 0) -> None:
        """Count a job that has ended, with so many others of its turns, and log it."""
        self.progress.finished(record, rivals)
        self._note_record(record)
        self.lost += not record.final
        for name, profile in record.profiles.items():
            if profile.reason:
                self.say(f"      profiler={name} {profile.status}: {profile.reason}")
        self.log(record)

    def log(self, record: Record) -> None:
        """Queue a record for the tracker, and hand it to the caller that waits for it."""
        context = self.opened
        context.tracker.log(record, context.folder / record.request.job)
        if self._each is not None:
            self._each(record, context.folder / record.request.job)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise UserError for a full or broken disk: jobs that leave no record would be measured in vain."""
        try:
            yield
        except OSError as error:
            folder = self.opened.folder
            if folder.is_dir():
                what = f"cannot write to {folder} ({error.strerror or error}): make room there"
            else:
                what = f"{folder} was moved or deleted: move it back"
            raise UserError(f"{what}, then finish with: {self.resume_command()}") from error

    def halt(self, record: Record) -> None:
        """End the sweep if `stop_on` names the record's status."""
        if stops(record):
            self.say(f"stopped at the first {record.status} job (stop_on), {record.request.job}: {record.reason}")
            raise SystemExit(1)


def _command(arguments: Sequence[str]) -> str:
    """Return the command as typed, without passwords in URIs."""
    return redacted(shlex.join(["python", "-m", "attn_exp", *arguments]))


def stops(record: Record) -> bool:
    """Return whether `stop_on` names the record's status."""
    return record.status in (record.request.config.get("stop_on") or ())


def _objective(record: Record | None) -> float:
    if record is None or record.status != "ok":
        return math.inf
    return _time_us(record.metrics, record.request.measuring)


def _time_us(metrics: Mapping[str, float], measuring: Measuring) -> float:
    return sum(metrics[f"{direction}/time_us"] for direction in measuring.passes)
