"""Read Nsight Compute's CSV (`--csv --page raw`) as launches with values in base units."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# The base units that we request (`--print-units base`), some of which still come with a prefix.
_SCALED = ("byte", "hz", "cycle", "inst")
# Sums and products of a few such numbers are finite.
_LARGEST = 1e60
_SECONDS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its name, launch shape, and values in base units (ns, byte, percent) by metric."""

    name: str
    grid: str
    block: str
    values: dict[str, float]


class CsvError(ValueError):
    """The text is no table of Nsight Compute's; the message says why."""


def read_launches(text: str) -> list[Launch]:
    """Return the launches in the order in which they ran; other lines of the program are skipped.

    Raises:
        CsvError: it is no CSV, there is no header, a row is too short, or a value cannot be a counter's.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise CsvError(f"ncu's table is no CSV: {error}") from error
    start = next((index for index, row in enumerate(rows) if "Kernel Name" in row), None)
    if start is None:
        raise CsvError("ncu printed no table of kernels")
    header = rows[start]
    place = {name: index for index, name in enumerate(header)}
    units: Sequence[str] = [""] * len(header)
    launches = []
    for row in rows[start + 1 :]:
        if row[0].startswith("=="):
            continue
        if len(row) != len(header):
            raise CsvError(f"a row of ncu's table has {len(row)} cells, the header {len(header)}")
        if not row[place["Kernel Name"]]:
            units = row  # the second row
            continue
        values = {}
        for name, cell, unit in zip(header, row, units, strict=True):
            if "__" in name and (number := _number(cell)) is not None:
                values[name] = number * _factor(unit)
                if not 0 <= values[name] <= _LARGEST:
                    raise CsvError(f"{name[:80]} is {cell[:40]} in ncu's table")
        grid, block = (row[place[name]] if name in place else "" for name in ("Grid Size", "Block Size"))
        launches.append(Launch(row[place["Kernel Name"]], grid, block, values))
    return launches


def _number(cell: str) -> float | None:
    """Parse `5,472` and `0.82`; return None for text and missing values (`n/a`, `nan`, `(!) nan`)."""
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None


def _factor(unit: str) -> float:
    """Return the factor from a unit to its base unit: nanoseconds, bytes, hertz, rates per second."""
    if unit in _SECONDS:
        return _SECONDS[unit]
    head, _, per = unit.partition("/")
    rate = 1e9 / _SECONDS[per] if per in _SECONDS else 1.0
    for name in _SCALED:
        if head.lower().endswith(name):
            return rate * _PREFIXES.get(head[: -len(name)], 1.0)
    return rate
