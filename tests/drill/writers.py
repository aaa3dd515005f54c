"""Eight processes that keep a sqlite database locked. Run by itself: one of them, until its standard input ends."""

import contextlib
import random
import select
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

WRITERS = 8
_HOLD_S, _PAUSE_S = 0.02, 0.3


class Writers:
    """Started at once, stopped together; `stop` says how often each held the database for itself."""

    def __init__(self, database: Path) -> None:
        command = [sys.executable, __file__, str(database)]
        self._processes = [
            subprocess.Popen([*command, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for index in range(WRITERS)
        ]

    def stop(self) -> list[int]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        counts = []
        for process in self._processes:
            assert process.stdout is not None
            counts.append(int(process.stdout.read() or 0))
            process.wait()
        self._processes = []
        return counts


def main(path: str, index: int) -> None:
    chance, held = random.Random(index), 0
    while not select.select([sys.stdin], [], [], chance.uniform(0, 2 * _PAUSE_S))[0]:
        # Before MLflow has made its tables there is nothing to write.
        with (
            contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as database,
            contextlib.suppress(sqlite3.OperationalError),
        ):
            database.execute("BEGIN EXCLUSIVE")
            database.execute("UPDATE alembic_version SET version_num = version_num")
            time.sleep(_HOLD_S)
            database.execute("COMMIT")
            held += 1
    print(held)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
