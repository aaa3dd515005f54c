"""python bench/numerics.py FOLDER [OTHER] [--plot FILE]: the tables of docs/numerics.md from +experiment=numerics.

Prints the error of each library in units in the last place (ULP), by dtype, tensor and length; its mean, its worst row
and what has the same bits. With another card's sweep as OTHER it prints how far the two agree.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from attn_exp.core.catalogue import About, colour_of
from attn_exp.core.record.checked import TensorError
from attn_exp.core.record.record import Record
from attn_exp.results.read import read_folder

TENSORS = ("out", "dq", "dk", "dv")
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}
# Cards whose figures differ by more are listed.
AGREE = 0.05
Key = tuple[str, str, str, str]


def records(folder: Path) -> Iterator[Record]:
    """The finished jobs of a sweep."""
    yield from (result.record() for result in read_folder(folder).results if result.status == "ok")


def shape(record: Record) -> str:
    """Lengths, heads and mask in a word: `4096 d128 causal`."""
    case = record.request.case
    lengths = str(case.q_len) if case.square else f"{case.q_len} of {case.kv_len}"
    return f"{lengths} d{case.head_dim} {'causal' if case.causal else 'full'}"


def figures(record: Record, name: str, error: TensorError) -> tuple[float, float, float, float]:
    """RMS and mean of an error with the halves of their intervals, in units of epsilon times the tensor's RMS.

    Records of the first day had another unit, from which these follow by the relative error.
    """
    assert error.ulps is not None and error.relative is not None
    first = next(one for one in record.judged if one.call == "first")
    rms = error.relative / EPSILON[first.form[name].dtype]
    factor = rms / error.ulps.rms if error.ulps.rms else 1.0
    halves = (half or 0.0 for half in (error.ulps.rms_half_width, error.ulps.mean_half_width))
    half, mean_half = (factor * one for one in halves)
    return rms, half, factor * error.ulps.mean, mean_half


def errors(folder: Path) -> dict[Key, tuple[float, float]]:
    """The root mean square error and half of its interval, by dtype, shape, library and tensor."""
    found = {}
    for record in records(folder):
        for measured in record.passes.values():
            for name, error in measured.errors.items():
                if error.ulps is not None and name in TENSORS:
                    key = (record.request.case.dtype, shape(record), record.label, name)
                    found.setdefault(key, figures(record, name, error)[:2])
    return found


def row(record: Record) -> dict[str, str]:
    """The cells of one job: the errors of all its tensors, and which results have the same bits."""
    by_tensor = {name: error for one in record.passes.values() for name, error in one.errors.items()}
    cells = {}
    for name in TENSORS:
        cells[name] = ""
        if name in by_tensor and by_tensor[name].ulps is not None:
            rms, half, mean, mean_half = figures(record, name, by_tensor[name])
            cells[name] = f"{rms:.3f} ±{half:.3f}"
            if name == "out":
                signed = f"{mean:+.3f} ±{mean_half:.3f}"
    worst = by_tensor["out"].worst_row
    cells |= {"mean of out": signed, "worst row": "" if worst is None else f"{worst:.2g}"}
    for way, head in (("calls", "calls"), ("batch_sizes", "batches"), ("phases", "phases")):
        facts = [one.bitwise[way] for one in record.passes.values() if way in one.bitwise]
        cells[head] = "/".join(fact.word for fact in facts)
    phase = record.passes["forward"].bitwise.get("phases")
    cells["phases by"] = f"{phase.first.max_abs:.2g}" if phase and phase.first and phase.first.max_abs else ""
    return cells


def tables(folder: Path) -> str:
    """A table for each dtype and shape."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in sorted(records(folder), key=lambda one: (one.request.case.dtype, one.request.case.kv_len, one.label)):
        groups[record.request.case.dtype, shape(record)].append(record)
    parts = []
    for (dtype, name), several in groups.items():
        # A library whose backward was measured, too, was run forward only for other dtypes.
        both = {record.label for record in several if "backward" in record.passes}
        several = [record for record in several if record.label not in both or "backward" in record.passes]
        rows = [{"library": record.label, **row(record)} for record in several]
        parts.append(f"{dtype}, {name}\n\n{tabulate(rows, headers='keys', tablefmt='github', disable_numparse=True)}")
    return "\n\n".join(parts)


def agreement(one: dict[Key, tuple[float, float]], other: dict[Key, tuple[float, float]]) -> str:
    """How far two cards agree, and where they do not."""
    ratios = {key: other[key][0] / one[key][0] for key in one.keys() & other.keys() if one[key][0]}
    near = {key for key, ratio in ratios.items() if abs(ratio - 1) <= AGREE}
    apart = {key for key in ratios.keys() - near if abs(one[key][0] - other[key][0]) > one[key][1] + other[key][1]}
    lines = [
        f"{len(ratios)} figures on both cards: {len(near)} agree within {AGREE:.0%}, "
        f"{len(ratios) - len(near) - len(apart)} more within their intervals, {len(apart)} do not; "
        f"median difference {statistics.median(abs(ratio - 1) for ratio in ratios.values()):.2%}"
    ]
    lines += [f"{' '.join(key)}: {one[key][0]:.3f} and {other[key][0]:.3f}" for key in sorted(apart)]
    return "\n".join(lines)


def plot(found: dict[Key, tuple[float, float]], path: Path) -> None:
    """Draw the error of out and dq over length, of causal heads of 128, a curve for each library."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, tensor in zip(axes, ("out", "dq"), strict=True):
        curves: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
        for (dtype, name, label, which), (rms, half) in found.items():
            if (dtype, which) == ("bfloat16", tensor) and name.endswith("d128 causal") and " of " not in name:
                curves[label].append((int(name.split()[0]), rms, half))
        for label, points in sorted(curves.items()):
            lengths, values, halves = zip(*sorted(points), strict=True)
            style = {"label": label, "color": colour_of(label, About()), "marker": "o", "markersize": 3, "capsize": 2}
            axis.errorbar(lengths, values, halves, linewidth=1, **style)
        axis.set(xscale="log", xlabel="tokens", ylabel="RMS error, ULP of bf16", title=tensor, ylim=(0, None))
        axis.set_xticks([1024, 4096, 16384], ["1,024", "4,096", "16,384"], minor=False)
        axis.minorticks_off()
    axes[1].legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    print(tables(given.sweep))
    found = errors(given.sweep)
    if given.other is not None:
        print(f"\n{agreement(found, errors(given.other))}")
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
