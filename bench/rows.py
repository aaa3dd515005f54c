"""The CSV files that the scripts of bench/ write."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def write_rows(
    path: Path, rows: Iterable[Mapping[str, object]], names: Sequence[str] = (), digits: int | None = None
) -> None:
    """Write rows under the names of the first one's columns, or under `names`; floats with so many digits."""
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names or list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            shown = digits is not None and {
                name: f"{one:.{digits}g}" for name, one in row.items() if isinstance(one, float)
            }
            writer.writerow({**row, **(shown or {})})
