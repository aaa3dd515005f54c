"""The context of a sweep or a duel: its folder, its tracker, its GPU and the process that measures."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from attn_exp.config.compose import isolation_options
from attn_exp.config.request import resolve_device
from attn_exp.core.errors import UserError
from attn_exp.core.files import PRIVATE, is_private, write_whole
from attn_exp.core.host.home import provide_home
from attn_exp.core.host.lacking import hold, make_private
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.file import FILE_NAME
from attn_exp.core.record.request import REQUEST_NAME
from attn_exp.core.versions import installed_note
from attn_exp.execution.gpus import Lease, lease
from attn_exp.execution.isolation import InProcess, RunFolder, make_isolation
from attn_exp.execution.worker import Worker
from attn_exp.results.store import IDENTITY_NAME
from attn_exp.tracking import make_tracker
from attn_exp.tracking.base import EndStatus, SweepInfo, Tracker

LOCK_NAME = ".sweep.lock"
# The files that Hydra's sweepers write into a sweep's folder before its first job.
_HYDRAS_OWN = {"multirun.yaml"}
# A command that was interrupted may still be storing what it has.
_END_S = 3.0


@dataclass(eq=False)
class SweepContext:
    """The resources of a sweep or a duel from its first job to its end.

    Its tracker is open already, `options` are the resolved configuration of its first job, and `exclusive` are the
    locks, closed at the end, when another command may run the sweep.
    """

    name: str
    folder: Path
    tracker: Tracker
    options: Mapping[str, Any]
    say: Callable[[str], None]
    exclusive: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _isolation: Worker | InProcess | None = field(default=None, init=False)
    _lease: Lease | None = field(default=None, init=False)

    @property
    def gpu_wait_s(self) -> float:
        """How long a GPU is waited for that others measure on."""
        return float(self.options["gpu_wait_s"])

    @property
    def gpu_uuid(self) -> str | None:
        """The GPU that is leased, if one is."""
        return self._lease.gpu.uuid if self._lease else None

    def start(
        self, device: str, gpus: Sequence[GpuInfo], *, worker: Worker | None = None, run_folder: RunFolder | None = None
    ) -> Worker | InProcess:
        """Lease a GPU if jobs run on one, and return the configured isolation.

        A `worker` is used if it was started as the configuration wants it, else closed. `run_folder` measures jobs in
        this process, for `isolation=none`.
        """
        isolation = make_isolation(isolation_options(self.options), run_folder)
        if device == "cuda":
            usable = resolve_device(str(self.options["device"]), list(gpus))[1]
            self._lease = lease(usable, self.say, self.gpu_wait_s)
        if worker is not None and isinstance(isolation, Worker) and isolation.takes(worker):
            worker.timeout_s, worker.profiler_timeout_s = isolation.timeout_s, isolation.profiler_timeout_s
            isolation = worker
        elif worker is not None:
            worker.close()
        self._isolation = isolation
        return isolation

    def stop(self) -> None:
        """Kill what still runs and release the GPU; the tracker stays open."""
        if self._isolation is not None:
            self._isolation.close()
        if self._lease is not None:
            self._lease.release()

    def abandon(self, status: EndStatus) -> None:
        """Stop, and end the tracker's run at once, so that it does not look as if it were still running."""
        self.stop()
        self.tracker.close(status, timeout_s=1.0)
        self.exclusive.close()


def open_context(
    options: Mapping[str, Any],
    command: str,
    say: Callable[[str], None],
    kind: Literal["sweep", "duel"] = "sweep",
    run_folder: RunFolder | None = None,
) -> SweepContext:
    """Make the folder of a sweep or duel and open its tracker.

    A sweep continues in a folder that exists, a duel never does. `options` are the resolved configuration of its first
    job, and `command` the command line as typed, without secrets. Raises UserError if the isolation or the tracker does
    not exist, the folder or the store cannot be written, or another command is running the sweep.
    """
    make_isolation(isolation_options(options), run_folder)
    # A caller from Python needs it, too.
    provide_home()
    tracker = make_tracker(options["tracker"])
    # Unlike `Path.resolve`, this raises nothing for links that lead in circles: making the folder does.
    folder = Path(os.path.realpath(options["folder"]))
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    exclusive, ours = contextlib.ExitStack(), kind == "duel"
    try:
        # A private sweep stays private, whatever a later command says.
        private = options.get("private", False) or is_private(folder)
        if private:
            exclusive.callback(os.umask, os.umask(PRIVATE))
        _check_ours(folder)
        folder.mkdir(parents=True, exist_ok=kind == "sweep")
        if private:
            make_private(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if kind == "sweep":
            exclusive.enter_context(_exclusive(folder, options["sweep"]))
            ours = True
        warning = tracker.open(SweepInfo(name=options["sweep"], folder=folder, command=command))
        write_whole(folder / "command.txt", f"{command}\n".encode())
    except OSError as error:
        exclusive.close()
        tracker.close("FAILED", timeout_s=1.0)
        # The link itself is named, which may be a file of the folder.
        place = error.filename if error.errno == errno.ELOOP and error.filename else folder
        raise UserError(f"cannot write to {place} ({error.strerror}): choose another with folder=...") from error
    except UserError:
        # Commands that start together may each have found no folder. Only the holder of its lock may remove it, and the
        # lock while it is held: else the next command would hold another file of that name.
        with contextlib.suppress(OSError):
            if made and ours:
                (folder / LOCK_NAME).unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
        exclusive.close()
        raise
    for line in filter(None, (tracker.where(), warning, installed_note())):
        say(line)
    return SweepContext(options["sweep"], folder, tracker, options, say, exclusive)


def _check_ours(folder: Path) -> None:
    """Raise UserError for a folder with files, of which none is a sweep's: tables and plots would replace them."""
    names = os.listdir(folder) if folder.is_dir() else []
    if all(name.startswith(".") or name in _HYDRAS_OWN for name in names) or {LOCK_NAME, IDENTITY_NAME} & {*names}:
        return
    # A sweep that is older than the lock and was tracked nowhere has only requests, one from an archive only records.
    if not any(folder.glob(f"*/{name}") for name in (REQUEST_NAME, FILE_NAME)):
        raise UserError(f"{folder} has files that are no sweep's, and is left as it is: choose another with folder=...")


def already_running(sweep: str) -> UserError:
    """Return the mistake of starting a sweep that another command is running."""
    return UserError(f"another command is running sweep={sweep}: wait for it, or choose another name")


@contextlib.contextmanager
def _exclusive(folder: Path, sweep: str) -> Iterator[None]:
    """Hold a sweep's folder against other commands of this machine; the system lets go of it when the process ends."""
    try:
        lock = hold(folder / LOCK_NAME, _END_S)
    except Timeout as error:
        # FileLock goes on trying where no file can be made at all, as in /proc.
        (folder / LOCK_NAME).lstat()
        raise already_running(sweep) from error
    try:
        yield
    finally:
        lock.release()
