"""The plan: which job suffers what, by a seed. A job is known by its batch size, which is all that tells jobs apart."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

SWEEPS = ("served", "local")
# Fewer jobs than this are a small drill: one sweep into sqlite, and one of the faults that end a worker, which takes
# seconds to replace. Other tests have a server that is lost or sick, each way in which a worker ends, and a parent that
# is killed.
LARGE = 100
_FEW = 1
QUOTES = "an error that quotes secrets"
# The share of the jobs after which a parent is first killed.
FIRST_END = 0.45
# Of the jobs of a sweep, the share that suffers each fault; at least one job does. All but "out of memory" are worth a
# retry, and those of `HARMLESS` leave the job's result as it is.
SHARES = {
    "killed by SIGKILL": 0.03,
    "killed by SIGTERM": 0.03,
    "segmentation fault": 0.03,
    "exit in a library": 0.02,
    "hang": 0.02,
    "out of memory": 0.03,
    QUOTES: 0.02,
    "end between two jobs": 0.02,
    "bytes that are no text for the parent": 0.02,
    "a daemon of its own": 0.02,
    "a log of two gigabytes": 0.02,
}
# What a small drill has of `HARMLESS`: the worker stays alive.
SMALL = ("bytes that are no text for the parent", "a daemon of its own", "a log of two gigabytes")
HARMLESS = ("end between two jobs", *SMALL)


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
    """Plans for both sweeps, of `jobs` together; every fault strikes at least once in each. A small drill has one."""
    if jobs < LARGE:
        ends = [fault for fault in SHARES if fault not in (*HARMLESS, "hang", QUOTES)]
        faults = [*random.Random(seed).sample(ends, _FEW), *SMALL, QUOTES]
        # Before the first run is ended: whoever strikes later costs another run.
        return {SWEEPS[-1]: _plan(SWEEPS[-1], jobs, faults, int(jobs * FIRST_END), random.Random(seed))}
    chance = random.Random(seed)
    found = {}
    for index, sweep in enumerate(SWEEPS):
        own = jobs // 2 + (jobs % 2 if index == 0 else 0)
        faults = [fault for fault, share in SHARES.items() for _ in range(max(1, round(share * own)))]
        found[sweep] = _plan(sweep, own, faults, own, chance)
    return found


def _plan(sweep: str, jobs: int, faults: list[str], last: int, chance: random.Random) -> Plan:
    """Return a plan whose faults strike up to the job `last`, and not in the first one, which opens the sweep alone."""
    victims = chance.sample(range(2, last + 1), len(faults))
    return Plan(sweep, jobs, dict(sorted(zip(victims, faults, strict=True))))
