"""python docs/embed.py: rewrite the generated blocks of README.md and docs/*.md from results/, the code and conf/.

A block begins with `<!-- KIND: FILE -->` or `<!-- KIND -->` and ends with `<!-- end -->`:

fastest   the answer of a sweep's records (SWEEP.tar.xz), below the regime and clock of its rows, and whether today's
          code measured them
backends  what the backends declare that they can compute
metrics   the metrics registered in attn_exp/core/record/metrics.py
statuses  attn_exp/core/record/status.py as a table
timers    the files of conf/timer/: their first comment, devices and secondary timers

`tests/test_docs.py` fails while a block differs from its source.
"""

import re
import tarfile
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from attn_exp.comparison.answer import compare_read
from attn_exp.comparison.choice import Choice
from attn_exp.comparison.rivals import Rivals
from attn_exp.core.conf import conf_folder, read_yaml
from attn_exp.core.provenance import measuring
from attn_exp.core.record.metrics import METRICS
from attn_exp.core.record.record import Record
from attn_exp.core.record.status import STATUSES
from attn_exp.core.sheet.render import sheet_markdown
from attn_exp.execution.capabilities import ask, markdown
from attn_exp.results.read import read_folder
from attn_exp.results.result import Result

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- (\w+)(?:: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def embedded(text: str, root: Path = ROOT) -> str:
    """Return the text with each block made anew from its source."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_made(match[2], match[3], root)}\n\n{match[4]}", text)


def _made(kind: str, file: str | None, root: Path) -> str:
    return _FROM_CODE[kind]() if file is None else _FROM_FILE[kind](root / file)


def fastest(file: Path) -> str:
    """Return the answer of a sweep's records: who is fastest where, and the rates with winners in bold."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
        rivals = compare_read(Choice(), [read_folder(Path(folder) / file.name.removesuffix(".tar.xz"))])
        assert isinstance(rivals, Rivals)
        jobs = {row.cell.result.job: row.cell.result for row in rivals.rows if row.cell.value is not None}
        how = age(jobs.values()) + measured_at([result.record() for result in jobs.values()])
    below = "\n\n".join(textwrap.fill(line, 120) for line in (rivals.table.note, rivals.answer.headline()[0]) if line)
    return f"{how}\n\n{sheet_markdown(rivals.table)}\n\n{below}"


def age(results: Iterable[Result]) -> str:
    """Return the line about results that other code measured than today's, empty if there is none."""
    known = {result.environment.get("measuring") for result in results if result.status == "ok"}
    return "" if known == {measuring()} else "Measured before the last change of what measures.\n\n"


def measured_at(records: Iterable[Record]) -> str:
    """Return the regime and the SM clock of records: `regime burst, SM clock 1,965 to 1,980 MHz`."""
    known = list(records)
    said = f"regime {' and '.join(sorted({one.request.measuring.regime for one in known}))}"
    clocks = [clock for record in known for clock in _clocks(record)]
    if not clocks:
        return said
    low, high = f"{min(clocks):,.0f}", f"{max(clocks):,.0f}"
    return f"{said}, SM clock {low if low == high else f'{low} to {high}'} MHz"


def _clocks(record: Record) -> Iterator[float]:
    """Yield the clock of each block, or of each pass whose blocks have none."""
    for measured in record.passes.values():
        blocks = measured.timings[0].clocks_mhz if measured.timings else ()
        if blocks:
            yield from blocks
        elif measured.window is not None and measured.window.clock_mhz is not None:
            yield measured.window.clock_mhz


def backends() -> str:
    """Return the table of what the backends declare."""
    return markdown(ask(None))


def metrics() -> str:
    """Return the table of metrics."""
    rows = [f"| `{one.name}` | {one.unit} | {one.description} |" for one in METRICS.values()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows])


def statuses() -> str:
    """Return the table of statuses."""
    head = "| status | meaning | retried by the same command? | set when | set in |\n|---|---|---|---|---|"
    rows = [
        f"| `{status}` | {info.meaning} | {'no' if info.final else 'yes'} | {info.why} | "
        f"{', '.join(f'`{path}`' for path in info.set_by)} |"
        for status, info in STATUSES.items()
    ]
    return "\n".join([head, *rows])


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


_FROM_FILE: dict[str, Callable[[Path], str]] = {"fastest": fastest}
_FROM_CODE: dict[str, Callable[[], str]] = {
    "backends": backends, "metrics": metrics, "statuses": statuses, "timers": timers,
}  # fmt: skip


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text()
        if (new := embedded(old)) != old:
            page.write_text(new)
            print(f"rewrote {page.relative_to(ROOT)}")
