"""What bench/hard_values.py has done, a line each, so that a kill loses nothing and the same command goes on."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from hard_worker import Row

# Of a backend and a kind on a case: the case's index, seed, backend, kind.
Key = tuple[int, int, str, str]


class Journal:
    """Lines of JSON: what the numbers depend on, then the rows of each backend and kind on a case.

    Args:
        path: the file, which is read if it exists.
        settings: what the numbers depend on; a `seed` of None is that of the file, or drawn.

    Raises:
        SystemExit: the file has other settings.
    """

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.done: dict[Key, list[Row]] = {}
        self.path = path
        # The last line of a process that was killed may be a part of one.
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        first, *lines = whole.splitlines() or [""]
        before = json.loads(first) if first else {"seed": secrets.randbelow(2**31)}
        if settings["seed"] is None:
            settings = settings | {"seed": before["seed"]}
        if first and before != settings:
            raise SystemExit(f"{path} is of {before}, not of {settings}: give another folder, or delete it")
        for line in lines:
            one = json.loads(line)
            self.done[one["index"], one["seed"], one["backend"], one["kind"]] = one["rows"]
        self.seed = int(str(settings["seed"]))
        path.write_text("".join(f"{line}\n" for line in (first or json.dumps(settings), *lines)))
        self._file = path.open("a")

    def add(self, key: Key, rows: Sequence[Row]) -> None:
        """Keep the rows of a backend and a kind on a case."""
        self.done[key] = list(rows)
        one = dict(zip(("index", "seed", "backend", "kind"), key, strict=True)) | {"rows": self.done[key]}
        self._file.write(json.dumps(one) + "\n")
        self._file.flush()
