"""The plan: which job suffers what, by a seed. A job is known by its batch size, which is all that tells jobs apart."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

SWEEPS = ("served", "local")
# Fewer jobs than this are a small drill: the faults are shared out between the sweeps, and of those that end a worker,
# which takes seconds to replace, each sweep gets two.
LARGE = 100
# Of the jobs of a sweep, the share that suffers each fault; at least one job does. All but "out of memory" are worth a
# retry, and those of `HARMLESS` leave the job's result as it is.
SHARES = {
    "killed by SIGKILL": 0.03,
    "killed by SIGTERM": 0.03,
    "segmentation fault": 0.03,
    "exit in a library": 0.02,
    "hang": 0.02,
    "out of memory": 0.03,
    "end between two jobs": 0.02,
    "bytes that are no text for the parent": 0.02,
    "a daemon of its own": 0.02,
    "a log of two gigabytes": 0.02,
}
HARMLESS = (
    "end between two jobs",
    "bytes that are no text for the parent",
    "a daemon of its own",
    "a log of two gigabytes",
)


@dataclass(frozen=True)
class Plan:
    """A sweep's jobs are of batch 1 to `jobs`; `faults` has the fault of each batch that suffers one."""

    sweep: str
    jobs: int
    faults: dict[int, str]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def struck(plan: Path, batch: int) -> Path:
    """The file beside a plan's that says that the fault of a batch has struck."""
    return plan.with_name(f"{plan.stem}-struck-{batch}")


def plans(jobs: int, seed: int) -> dict[str, Plan]:
    """Plans for both sweeps, of `jobs` together; every fault strikes at least once in each."""
    chance = random.Random(seed)
    found = {}
    for index, sweep in enumerate(SWEEPS):
        own = jobs // 2 + (jobs % 2 if index == 0 else 0)
        faults = [fault for fault, share in SHARES.items() for _ in range(max(1, round(share * own)))]
        # A small drill shares the faults out: each costs the start of another worker.
        small = jobs < LARGE
        if small:
            ends = [fault for fault in faults if fault not in HARMLESS]
            ends = random.Random(seed).sample(ends, 2 * len(SWEEPS))
            faults = [*ends, *HARMLESS][index :: len(SWEEPS)]
        # Not in the first job, which opens the sweep alone. In a small drill before the first run is ended, at half of
        # the jobs: whoever strikes later costs another run.
        victims = chance.sample(range(2, max(own // 2, len(faults) + 1) + 1 if small else own + 1), len(faults))
        found[sweep] = Plan(sweep, own, dict(sorted(zip(victims, faults, strict=True))))
    return found
