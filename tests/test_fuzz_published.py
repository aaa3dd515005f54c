"""Published figures, mutated, through compare and the API: a reason, or ratios that are those of the file's numbers.

`make fuzz` tries ten thousand.
"""

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import sweeps
from hypothesis import given
from hypothesis import strategies as st
from mutations import ODD, attempt, contents, mutated

from attn_exp import compare, load
from attn_exp.commands.compare import main as compare_main
from attn_exp.compare.published import Published
from attn_exp.core.case import Case
from attn_exp.core.errors import UserError
from attn_exp.core.safe_text import printable_text

LENGTHS = (1024, 4096)
ROWS = [
    ["source", "gpu", "library", "version", "pass", "dtype", "seq_len", "head_dim", "causal", "window", "tflops"],
    ["a paper", "H200", "cuDNN", "9.1", "forward", "bf16", "1024", "128", "true", "", "300"],
    ["a paper", "H100", "FlashAttention-3", "3.0", "backward", "bf16", "4096", "128", "true", "none", "550.5"],
    ["a blog", "H200 SXM", "xFormers", "", "forward", "", "1024", "", "", "-1", "1e2"],
]
FORMS = ["table", "markdown", "csv", "json", "latex"]


def written(rows: list[list[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode(errors="replace")


WHOLE = written(ROWS)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file with odd cells, columns and rows, or with changed bytes, or with both."""
    rows = [list(row) for row in ROWS]
    for _ in range(draw(st.integers(0, 4))):
        row = draw(st.sampled_from(rows)) if rows else []
        at = draw(st.integers(0, max(0, len(row) - 1)))
        match draw(st.sampled_from(["odd", "odd", "number", "gone", "double", "column"])):
            case "odd" if row:
                row[at] = str(draw(ODD))
            case "number" if row:
                row[at] = draw(
                    st.sampled_from(["5e-324", "1e308", "-0.0", "1_0", "٣", "0x10", "nan", "1e400", "1e-300"])
                )
            case "gone" if row:
                del row[at]
            case "double" if rows:
                rows.insert(draw(st.integers(0, len(rows))), list(row))
            case "column":
                for one in rows:
                    one.insert(0, draw(st.sampled_from(["batch", "q_len", "step", "fp8", "2", "tflops", ""])))
    content = written(rows)
    return draw(contents([content.decode()], content)) if draw(st.booleans()) else content


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a sweep; the commands are run in it."""
    folder = tmp_path_factory.mktemp("published")
    records = [
        sweeps.job(name, us, us * 2.5, of=sweeps.case(seq_len=length))
        for length in LENGTHS
        for name, us in (("flash", 100.0 + length), ("cudnn", 101.0 + length))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sweeps.write(folder / "multirun" / "first", records)
        yield folder


def tflops(case: Case, direction: str, time_us: float) -> float:
    """The published convention, apart from the package's: 4 S S D a head, half if causal, 2.5 times backward."""
    flops = 4.0 * case.q_len * case.kv_len * case.head_dim * case.q_heads * case.batch
    return flops * (0.5 if case.causal else 1.0) * {"forward": 1.0, "backward": 2.5}[direction] / time_us / 1e6


def check(found: Published, content: bytes) -> None:
    """Check each ratio against the numbers of the file, whose cells another reader splits."""
    cells = {cell for row in csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="")) for cell in row}
    numbers = {value for value in map(number, cells) if value is not None}
    for row in found.rows:
        assert row.figure.tflops in numbers
        assert row.cell.value is not None
        ours = tflops(row.cell.result.case, row.figure.direction, row.cell.value)
        assert math.isclose(row.tflops, ours, rel_tol=1e-9)
        assert math.isfinite(row.ratio) and math.isclose(row.ratio * row.figure.tflops, ours, rel_tol=1e-9)
    assert all(len(sentence) < 2000 and "\n" not in sentence for sentence in found.notes)


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@mutated(40)
@given(content=files(), form=st.sampled_from(FORMS))
def test_mutated_figures_have_a_reason_or_are_compared(
    world: Path, content: bytes, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "figures.csv").write_bytes(content)
    found, refusal = attempt(lambda: compare(load("first"), published="figures.csv"), UserError)
    assert refusal is None or ("figures.csv" in refusal and len(refusal) < 2000)
    if found is not None:
        assert isinstance(found, Published) and found.rows
        check(found, content)
    code = compare_main(["first", "published=figures.csv", f"format={form}"])
    assert code == (2 if found is None else 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert out + err == printable_text(out + err)


def test_the_unchanged_ones_are_compared(world: Path) -> None:
    (world / "figures.csv").write_bytes(WHOLE)
    found = compare(load("first"), published="figures.csv")
    assert isinstance(found, Published)
    check(found, WHOLE)
    assert {(row.figure.library, row.cell.result.label) for row in found.rows} == {
        ("cuDNN", "cudnn"), ("FlashAttention-3", "flash"), ("xFormers", "flash"),
    }  # fmt: skip
