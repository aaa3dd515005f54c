"""python -m drill [JOBS] [--seed N]: sweeps in which everything goes wrong, and whether anything was lost.

Two sweeps at once, one into a tracking server and one into sqlite, on the CPU, in a temporary folder; of few jobs only
the latter. Prints how often
each fault happened, by what it left, and what does not hold at the end; exit code 1 if anything does not.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from test_tracking_patience import SICK

from drill.campaigns import CONTAINER, ENDS, LACKING, SAVED, Campaign, local, served
from drill.command import NOBODY, Command
from drill.disk import into_a_namespace, make_disk
from drill.ends import Ends
from drill.evidence import held_locks, leaks, processes
from drill.odd import DATABASES, IN_PLACE, Private
from drill.plan import LARGE, QUOTES, SHARES, SMALL, plans
from drill.server import Server
from drill.starts import Starts

# Of fewer jobs not every fault finds its own.
FEWEST = 24
# Besides those of the plan; by what their names begin with.
_OTHERS = (
    *SMALL,
    QUOTES,
    "in the place of a record",
    "in the place of sweep.id",
    "links out of the sweep",
    "the disk full",
    "records cut in half",
    "the clock set back",
)
# And those that a small drill leaves out: each takes a run of the command.
_OF_LARGE = (
    # A few jobs may be over before the writers hold the file.
    "sqlite locked by eight writers",
    *SHARES,
    *ENDS,
    "the parent killed by SIGKILL",
    CONTAINER,
    LACKING,
    SAVED,
    "the sweep's identity lost",
    "the parent killed while MLflow's database is made",
    "the same command twice at once",
    "the tracking server stopped and started",
    *(f"a sick tracking server: {kind}" for kind in SICK),
    *(f"in the place of the database: {kind}" for kind in DATABASES),
    *(f"in the place of a record: {kind}" for kind in IN_PLACE),
    "in the place of a job",
    "a strange record",
    *(f"odd and strange things read by {reader}" for reader in ("compare", "explain", "log")),
    "an accent on a terminal of ASCII",
    "no home and no entry of the user",
    "a database of an older MLflow, refused",
)


def drill(world: Path, jobs: int, seed: int, *, limit: bool) -> tuple[Counter[str], list[str]]:
    """Run the drill in a folder: the count of each fault, and what is wrong at the end."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", flush=True)

    server, disk = Server(world / "server"), make_disk(world / "disk", limit=limit)
    own = plans(jobs, seed)
    for name, plan in own.items():
        plan.write(world / f"plan-{name}.json")
        say(f"{name}: {plan.jobs} jobs, {len(plan.faults)} of them suffer: {dict(Counter(plan.faults.values()))}")
    # What ends a text in Python or SQL.
    signs = world / "disk" / "100 o'clock"
    signs.mkdir()
    places = {"served": world / "multirun" / "served", "local": world / "disk" / "local"}
    trackers = {
        "served": [f"tracker.uri={server.uri}"],
        "local": [f'tracker.uri="sqlite:///{signs}/local.db"', f'tracker.artifacts="{signs}/artifacts"'],
    }
    # As in a container that is started with `--user 12345`, on a terminal that knows only ASCII.
    variables = {"served": {NOBODY: "1", "PYTHONIOENCODING": "ascii:strict"}}
    private = Private(world / "private")
    databases = {"served": server.database, "local": signs / "local.db"}
    campaigns = {
        name: Campaign(
            plan,
            Command(
                world,
                name,
                plan.jobs,
                world / f"plan-{name}.json",
                places[name],
                trackers[name],
                variables=variables.get(name),
            ),
            databases[name],
            say,
            random.Random(seed),
            private,
        )
        for name, plan in own.items()
    }
    try:
        whole = {"served": (served, server), "local": (local, disk)}
        threads = [
            threading.Thread(target=_guarded, args=(whole[name][0], campaign, whole[name][1]), daemon=True)
            for name, campaign in campaigns.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.stop()
    wrong = [line for campaign in campaigns.values() for line in campaign.wrong]
    left = processes(world)
    wrong += [f"process {number} is left" for number in left]
    wrong += held_locks(world) + private.touched() + leaks(world)
    counts = sum((campaign.counts for campaign in campaigns.values()), Counter[str]())
    for fault in (*_OTHERS, *(_OF_LARGE if jobs >= LARGE else ())):
        if not any(what.startswith(fault) and count for what, count in counts.items()):
            wrong.append(f"no sign of a fault that was to be drilled: {fault}")
    disk.close()
    return counts, wrong


def _guarded(run: object, campaign: Campaign, tool: object) -> None:
    try:
        run(campaign, tool)  # type: ignore[operator]
    except Exception as error:
        failed = f"{campaign.plan.sweep}: the drill itself failed: {error!r}"
        campaign.say(failed)
        campaign.wrong.append(failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m drill", description=__doc__)
    parser.add_argument("jobs", nargs="?", type=int, default=200, help=f"jobs in all, {FEWEST} or more")
    parser.add_argument("--seed", type=int, default=7, help="which jobs suffer what")
    parser.add_argument("--ends", type=int, help="in place of all this: end a command so often at random moments")
    parser.add_argument("--starts", type=int, help="in place of all this: start commands together so often")
    parser.add_argument("--limit", action="store_true", help="fill the disk by RLIMIT_FSIZE, not by a small tmpfs")
    parser.add_argument("--keep", action="store_true", help="leave the folder there, to look at")
    given = parser.parse_args()
    if given.jobs < FEWEST:
        parser.error(f"fewer than {FEWEST} jobs are too few for every fault")
    into_a_namespace(["-m", "drill", *sys.argv[1:]])
    # Whoever ends the drill early gets the server ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A shell starts what is in the background deaf to these, as are its children then.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    began = time.monotonic()
    world = Path(tempfile.mkdtemp(prefix="attn_exp_drill_")).resolve()
    try:
        others = Ends(world, given.ends, given.seed) if given.ends else None
        others = Starts(world, given.starts) if given.starts else others
        if others is not None:
            others.run()
            counts, wrong = others.counts, others.wrong
        else:
            counts, wrong = drill(world, given.jobs, given.seed, limit=given.limit)
    finally:
        if given.keep:
            print(f"kept: {world}")
        else:
            shutil.rmtree(world, ignore_errors=True)
    what = f"{given.ends} ends or more" if given.ends else f"{given.jobs} jobs"
    what = f"{given.starts} starts" if given.starts else what
    print(f"\n{what}, seed {given.seed}, {time.monotonic() - began:.0f} s")
    for fault, count in sorted(counts.items()):
        print(f"{count:6d}  {fault}")
    for line in wrong:
        print(f"WRONG: {line}")
    print("nothing was lost" if not wrong else f"{len(wrong)} things do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
