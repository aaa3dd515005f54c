"""What each of several rivals in one process has set for itself: it holds in that rival's blocks, and in no other's."""

import contextlib
from collections.abc import Iterator

from attn_exp.worker.machine.process_state import ProcessState
from attn_exp.worker.machine.settings import Settings
from attn_exp.worker.stopped import Stopped


class OwnState:
    """A rival's settings of PyTorch and of the process, which start as those that the process has.

    Args:
        settings: PyTorch's settings before any backend was loaded.
    """

    def __init__(self, settings: Settings) -> None:
        self._shared, self._own = settings, settings
        self._shared_process = self._own_process = ProcessState.now()
        self._is_inside = False
        self.set_back: set[str] = set()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Have the rival's settings inside, as it left them, and afterwards those that the process started with.

        Names of what had to be set back are added to `set_back`. Inside of itself this does nothing.

        Raises:
            Stopped: something cannot be set back, so that it would hold for the other rivals.
        """
        if self._is_inside:
            yield
            return
        self._is_inside = True
        self._own.restore()
        self._own_process.restore()
        try:
            yield
        finally:
            self._is_inside = False
            self._own, self._own_process = Settings.now(), ProcessState.now()
            changed = self._shared_process.changed()
            self.set_back |= {*self._shared.changed(), *changed}
            self._shared.restore()
            if changed and not self._shared_process.restore():
                names = ", ".join(changed)
                raise Stopped("implausible", f"it changed what cannot be set back for its rivals: {names}")
