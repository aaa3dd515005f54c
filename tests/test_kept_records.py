"""The tables in results/ follow from the records beside them."""

import re
import tarfile
from pathlib import Path

import pytest
import yaml

from attn_exp.results.read import read_folder
from attn_exp.results.table import table

RESULTS = Path(__file__).resolve().parents[1] / "results"
KEPT = sorted(RESULTS.glob("*/*/*.tar.xz"))


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_kept_table_is_that_of_its_records(archive, tmp_path):
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    name = archive.name.removesuffix(".tar.xz")
    sweep = read_folder(tmp_path / name)
    assert not sweep.broken
    kept = archive.with_name(f"{name}.txt").read_text()
    # Columns that an experiment adds are in its YAML.
    made_by = re.search(r"\+experiment=(\w+)", (tmp_path / name / "command.txt").read_text())
    experiment = made_by and RESULTS.parent / f"conf/experiment/{made_by[1]}.yaml"
    columns = yaml.safe_load(experiment.read_text()).get("columns", ()) if experiment else ()
    assert f"{table(sweep.results, columns=columns)}\n" == kept


def test_the_records_take_4_mb_at_most():
    assert 0 < sum(archive.stat().st_size for archive in KEPT) < 4e6
