"""Write a profile's kernels as CSV: one row for each kernel, one column for each figure."""

import csv
import io
from collections.abc import Sequence

from attn_exp.core.profile import ProfiledKernel


def kernels_csv(kernels: Sequence[ProfiledKernel]) -> str:
    """Return `pass`, `name`, `count`, `time_us`, `share` of the pass's time, then all figures.

    Empty where unknown.
    """
    figures = list(dict.fromkeys(name for kernel in kernels for name in kernel.figures))
    whole: dict[str, float] = {}
    for kernel in kernels:
        whole[kernel.direction] = whole.get(kernel.direction, 0.0) + (kernel.time_us or 0.0)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["pass", "name", "count", "time_us", "share", *figures])
    for kernel in kernels:
        share = kernel.time_us / whole[kernel.direction] if kernel.time_us else None
        known = [kernel.count, kernel.time_us, share, *(kernel.figures.get(name) for name in figures)]
        writer.writerow([kernel.direction, kernel.name, *map(_cell, known)])
    return buffer.getvalue()


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6g}"
