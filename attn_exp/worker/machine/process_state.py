"""What the system grants a whole process: what one job takes away must not be missing for the next."""

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from attn_exp.core.cpu import allowed_cpus

_State = tuple[Callable[[], Any], Callable[[Any], object]]
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _umask() -> int:
    present = os.umask(0o077)
    os.umask(present)
    return present


def _folder() -> str | None:
    """Return the working folder, None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


_STATE: dict[str, _State] = {
    "umask": (_umask, os.umask),
    "folder": (_folder, os.chdir),
    "processors": (allowed_cpus, lambda processors: os.sched_setaffinity(0, processors)),
    "priority": (
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda priority: os.setpriority(os.PRIO_PROCESS, 0, priority),
    ),
    **{f"limit {limit}": (partial(resource.getrlimit, limit), partial(resource.setrlimit, limit)) for limit in _LIMITS},
}


@dataclass(frozen=True)
class ProcessState:
    """Umask, working folder, processors, priority and limits (getrlimit(2)) as they were."""

    values: dict[str, Any]

    @classmethod
    def now(cls) -> "ProcessState":
        """Return the present state."""
        return cls({name: get() for name, (get, _) in _STATE.items()})

    def changed(self) -> list[str]:
        """Return the names of what is otherwise now."""
        return [name for name, (get, _) in _STATE.items() if get() != self.values[name]]

    def restore(self) -> bool:
        """Set back what was changed; return whether all of it could be. Only root may raise some of it again."""
        for name in self.changed():
            with contextlib.suppress(OSError, TypeError, ValueError):
                _STATE[name][1](self.values[name])
        return not self.changed()
