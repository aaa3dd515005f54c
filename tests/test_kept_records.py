"""The tables in results/ follow from the records beside them, and README says whether today's code measured them."""

import importlib.util
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from attn_exp.core.provenance import measuring
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


OLD = "Measured before the last change of what measures."


def test_readme_says_it_if_what_measures_has_changed_since(tmp_path):
    readme = (RESULTS.parent / "README.md").read_text()
    ((file, block),) = re.findall(r"<!-- fastest: (\S+\.tar\.xz) -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    with tarfile.open(RESULTS.parent / file) as archive:
        archive.extractall(tmp_path, filter="data")
    (sweep,) = tmp_path.iterdir()
    measured = [result for result in read_folder(sweep).results if result.status == "ok"]
    hashes = {result.environment.get("measuring") for result in measured}
    assert (OLD in block) == (hashes != {measuring()}), "run python docs/embed.py"


def test_only_records_that_today_s_code_measured_need_no_such_line():
    spec = importlib.util.spec_from_file_location("embed", RESULTS.parent / "docs" / "embed.py")
    embed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embed)

    def result(hash_, status="ok"):
        return SimpleNamespace(status=status, environment={"measuring": hash_} if hash_ else {})

    assert embed.age([result(measuring()), result(None, "unavailable")]) == ""
    for others in ([result(None)], [result("other")], [result(measuring()), result("other")]):
        assert embed.age(others) == f"{OLD}\n\n"
