"""The tables in results/h200 are read back as records, so that today's answers can be tried on them."""

import importlib.util
from pathlib import Path

import pytest

from attn_exp import compare

ROOT = Path(__file__).resolve().parents[1]
# The tables with more than one backend.
TABLES = [ROOT / "results/h200" / name for name in ("backends/table.csv", "cases/determinism.csv")]


@pytest.fixture(scope="module")
def kept_table():
    spec = importlib.util.spec_from_file_location("kept_table", ROOT / "bench" / "kept_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_kept_table_has_an_answer(kept_table, table, tmp_path):
    found = compare(kept_table.keep(table, tmp_path / table.stem))
    assert found.answer.lines()
    # No row without a result stands for a pass that nobody asked for.
    measured = {row.cell.direction for row in found.rows if row.cell.value is not None}
    assert {row.cell.direction for row in found.rows} == measured
