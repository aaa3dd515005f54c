"""python docs/embed.py: rewrite the generated blocks of README.md and docs/*.md from results/, the code and conf/.

A block begins with `<!-- KIND: FILE -->` or `<!-- KIND -->` and ends with `<!-- end -->`:

fastest   a table of rates from a sweep's table.csv
text      a text file as it is
bits      a table of what table.csv says of equal bits, from `+experiment=determinism`
sweep     two sentences from bench/sdpa_sweep.py's summary.json
backends  what the backends declare that they can compute
metrics   the metrics registered in attn_exp/core/metrics.py
statuses  attn_exp/core/status.py as a table
timers    the files of conf/timer/: their first comment, devices and secondary timers

`tests/test_docs.py` fails while a block differs from its source.
"""

import csv
import json
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from attn_exp.compare.ratio import OTHER_GPU_SPREAD, POWER_CAPPED_SPREAD
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.interval import Uncertainty, combined
from attn_exp.core.metrics import METRICS
from attn_exp.core.multiple_tests import worse_than_best
from attn_exp.core.status import status_table
from attn_exp.run.capabilities import ask, markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- (\w+)(?:: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
# Two rows of one sweep that differ by less do not differ (docs/comparison_method.md).
_ROW_SPREAD = 0.01

Row = dict[str, str]


def embedded(text: str, root: Path = ROOT) -> str:
    """Return the text with each block made anew from its source."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_made(match[2], match[3], root)}\n\n{match[4]}", text)


def _made(kind: str, file: str | None, root: Path) -> str:
    return _FROM_CODE[kind]() if file is None else _FROM_FILE[kind](root / file)


def fastest(file: Path) -> str:
    """Return a table of rates, a row for each shape and pass and a column for each backend, the fastest in bold.

    Backends that are too close to the fastest to call are bold as well. The sentence below counts the rows.
    """
    rows = [row for row in csv.DictReader(file.read_text().splitlines()) if row["status"] == "ok"]
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for direction in ("forward", "backward"):
        for row in rows:
            cells.setdefault((*_shape(row), direction), {})[row["backend"]] = row
    names = sorted({row["backend"] for row in rows}, key=lambda name: -_mean_rate(cells, name))
    lines = [f"| {' | '.join(('shape', 'mask', 'pass', *(f'`{name}`' for name in names)))} |"]
    lines.append(f"|{'---|' * 3}{'--:|' * len(names)}")
    leaders: Counter[tuple[str, ...]] = Counter()
    for (shape, mask, direction), rivals in cells.items():
        best = _leaders(rivals, direction)
        leaders[best] += 1
        rates = [_rate(rivals, name, direction, bold=name in best) for name in names]
        lines.append(f"| {' | '.join((shape, mask, direction, *rates))} |")
    counts = "; ".join(f"{_listed(best)} in {count}" for best, count in leaders.most_common())
    return "\n".join([*lines, "", f"Fastest, of {len(cells)} rows: {counts}."])


def _shape(row: Row) -> tuple[str, str]:
    shape = f"{row['batch']} x {row['q_heads']} x {int(row['q_len']):,} x {row['head_dim']}"
    return shape, "causal" if row["causal"] == "True" else "full"


def _mean_rate(cells: dict[tuple[str, ...], dict[str, Row]], name: str) -> float:
    rates = [float(rivals[name][f"{key[-1]}/tflops"]) for key, rivals in cells.items() if name in rivals]
    return statistics.geometric_mean(rates)


def _leaders(rivals: dict[str, Row], direction: str) -> tuple[str, ...]:
    best = min(rivals.values(), key=lambda row: float(row[f"{direction}/time_us"]))
    others = [name for name, row in rivals.items() if row is not best]
    worse = worse_than_best([_p_value(rivals[name], best, direction) for name in others])
    behind = {name for name, one in zip(others, worse, strict=True) if one}
    return tuple(name for name in rivals if name not in behind)


def _listed(best: tuple[str, ...]) -> str:
    text = ", ".join(f"`{name}`" for name in best)
    return f"{text} (too close to call)" if len(best) > 1 else text


def _p_value(row: Row, best: Row, direction: str) -> float:
    capped = any("power_capped" in one["flags"].split() for one in (row, best))
    spread = POWER_CAPPED_SPREAD if capped else _ROW_SPREAD
    if row["gpu_uuid"] != best["gpu_uuid"]:
        spread = math.hypot(spread, OTHER_GPU_SPREAD)
    time, best_time = (float(one[f"{direction}/time_us"]) for one in (row, best))
    doubt = combined([_uncertainty(row, direction), _uncertainty(best, direction), Uncertainty(math.log1p(spread))])
    return doubt.p_value(math.log(time / best_time))


def _uncertainty(row: Row, direction: str) -> Uncertainty:
    low, high, rounds = (float(row[f"{direction}/{name}"]) for name in ("time_low_us", "time_high_us", "rounds"))
    return Uncertainty(math.log(high / low) / 2, rounds - 1)


def _rate(rivals: dict[str, Row], name: str, direction: str, *, bold: bool) -> str:
    if name not in rivals:
        return ""
    rate = f"{float(rivals[name][f'{direction}/tflops']):.0f}"
    return f"**{rate}**" if bold else rate


def bits(file: Path) -> str:
    """Return a table of backends, with and without the option `deterministic`: times, and whether bits are equal."""
    lines = [
        "| backend | queries x keys | pass | us | same bits in every call | whatever the batch | workspace, MB |",
        "|---|---|---|--:|---|---|--:|",
    ]
    rows = [row for row in csv.DictReader(file.read_text().splitlines()) if row["status"] == "ok"]
    for row in sorted(rows, key=lambda row: (-int(row["q_len"]), row["label"])):
        for direction in ("forward", "backward"):
            if not row[f"{direction}/time_us"]:
                continue
            facts = (
                {"1": "yes", "0": "no"}[row[f"{direction}/{name}"]] for name in ("deterministic", "batch_invariant")
            )
            workspace = row[f"{direction}/workspace_bytes"]
            cells = (
                f"`{row['label']}`", f"{int(row['q_len']):,} x {int(row['kv_len']):,}", direction,
                f"{float(row[f'{direction}/time_us']):.0f}", *facts, workspace and f"{float(workspace) / 1e6:.1f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def text(file: Path) -> str:
    """Return a text file as a code block."""
    return f"```text\n{file.read_text().rstrip()}\n```"


def sweep(file: Path) -> str:
    """Return bench/sdpa_sweep.py's summary in two sentences."""
    summary = json.loads(file.read_text())
    text = (
        f"The sweep took {summary['attn_exp_s']:.1f} s on one {summary['gpu']} with torch {summary['torch']}, "
        "including start-up, checks, plots and MLflow. A plain loop of PyTorch's `do_bench_using_profiling` over the "
        f"same 30 configurations, which checks and stores nothing, took {summary['plain_loop_s']:.1f} s."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def backends() -> str:
    """Return the table of what the backends declare."""
    return markdown(ask("cpu", None))


def metrics() -> str:
    """Return the table of metrics."""
    rows = [f"| `{one.name}` | {one.unit} | {one.description} |" for one in METRICS.values()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows])


def timers() -> str:
    """Return the table of timers."""
    rows = []
    for path in sorted((conf_folder() / "timer").glob("*.yaml")):
        about = path.read_text().partition("\n")[0].partition(": ")[2].rstrip(".")
        options = read_yaml(path)
        devices = ", ".join({"cuda": "GPU", "cpu": "CPU"}[name] for name in options.get("devices", ("cuda", "cpu")))
        also = ", ".join(f"`{name}`" for name in options["also"])
        rows.append(f"| `{path.stem}` | {about} | {devices} | {also} |")
    return "\n".join(["| timer | measures | on | secondary timers |", "|---|---|---|---|", *rows])


_FROM_FILE: dict[str, Callable[[Path], str]] = {"bits": bits, "fastest": fastest, "text": text, "sweep": sweep}
_FROM_CODE: dict[str, Callable[[], str]] = {
    "backends": backends, "metrics": metrics, "statuses": status_table, "timers": timers,
}  # fmt: skip


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text()
        if (new := embedded(old)) != old:
            page.write_text(new)
            print(f"rewrote {page.relative_to(ROOT)}")
