"""The backend of the drill: right and quick, unless the plan says that this job suffers; then once, and never again."""

import json
import os
import signal
from pathlib import Path

from crashers import ExhaustsMemory, Exits, Hangs, Segfaults, _Hurts

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.core.case import Case
from drill.plan import struck

_FAULTS = {
    "segmentation fault": Segfaults,
    "exit in a library": Exits,
    "hang": Hangs,
    "out of memory": ExhaustsMemory,
}


class Drilled(_Hurts):
    """`plan` is the file of a `Plan`; beside it stands a file for every fault that has struck."""

    def __init__(self, name: str, plan: str) -> None:
        super().__init__(name)
        self._plan = Path(plan)
        self._batch = 0

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        self._batch = case.batch
        return super().prepare(case, inputs)

    def hurt(self) -> None:
        fault = json.loads(self._plan.read_bytes())["faults"].get(str(self._batch))
        mark = struck(self._plan, self._batch)
        if fault is None or mark.exists():
            return
        mark.touch()
        if fault.startswith("killed by "):
            os.kill(os.getpid(), signal.Signals[fault.removeprefix("killed by ")])
        else:
            _FAULTS[fault](self.name).hurt()
