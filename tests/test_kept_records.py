"""Pages or READMEs name each file in results/, tables follow from records, and it is said what code measured them."""

import fnmatch
import importlib.util
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from attn_exp.core.provenance import measuring
from attn_exp.core.record.record import METHOD_VERSION
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


def test_the_records_take_6_mb_at_most():
    assert 0 < sum(archive.stat().st_size for archive in KEPT) < 6e6


PAGES = [RESULTS.parent / "README.md", *sorted((RESULTS.parent / "docs").glob("*.md"))]
READMES = sorted(RESULTS.rglob("README.md"))


def rows(readme):
    """Yield the files that each row of a README's tables names, as patterns of paths in results/, and its text."""
    for line in re.findall(r"^\| .+$", readme.read_text(), re.MULTILINE):
        folder = ""
        names = []
        for name in re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", line.split(" | ")[0].removeprefix("| ")).split(", "):
            # `backends/table.csv, table.txt` are of one folder.
            folder = name.rpartition("/")[0] if "/" in name else folder
            names.append(str(readme.parent.relative_to(RESULTS) / folder / name.rpartition("/")[2]))
        yield names, line


def named():
    """Return the patterns of paths in results/ that a page links to or a row of a README has."""
    found = {name for readme in READMES for names, _ in rows(readme) for name in names}
    for page in (*PAGES, *READMES):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            place = (page.parent / target).resolve()
            if "://" not in target and place.is_file() and place.is_relative_to(RESULTS):
                found.add(str(place.relative_to(RESULTS)))
    return found


def unnamed(paths):
    patterns = named()
    return [path for path in paths if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]


def test_every_file_is_named_by_a_page_or_by_the_readme_of_its_folder():
    files = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*") if path.is_file()}
    assert unnamed(sorted(files - {f"{folder.name}/README.md" for folder in RESULTS.iterdir()})) == []
    added = ["h200/backends/new.csv", "h200/numerics/new.txt", "h100/new/table.tar.xz", "cpu/new.txt"]
    assert unnamed(added) == added
    # Nor does a README name what is not there.
    gone = [name for readme in READMES for names, _ in rows(readme) for name in names
            if "." in Path(name).name and not fnmatch.filter(files, name)]  # fmt: skip
    assert gone == []


def older(archive):
    """Return the hash that an archive's row has, as `hash 0123456789abcdef`, if today's code is another."""
    own = str(archive.relative_to(RESULTS))
    lines = [line for readme in READMES for names, line in rows(readme) for name in names if fnmatch.fnmatch(own, name)]
    return {one for line in lines for one in re.findall(r"\bhash ([0-9a-f]{16})\b", line)}


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: str(path.relative_to(RESULTS)))
def test_an_archive_of_this_method_is_of_today_s_code_unless_its_row_names_another_hash(archive, tmp_path):
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    results = read_folder(tmp_path / archive.name.removesuffix(".tar.xz")).results
    (method,) = {result.method_version for result in results}
    hashes = {result.environment.get("measuring") for result in results if result.method_version == METHOD_VERSION}
    assert method != METHOD_VERSION or hashes == (older(archive) or {measuring()})
    assert older(archive) != {measuring()}


def test_the_readmes_of_gpus_name_the_hash_of_today_s_code():
    for gpu in ("h100", "h200"):
        head = (RESULTS / gpu / "README.md").read_text().partition("\n|")[0]
        assert f"hash {measuring()}" in " ".join(head.split()), gpu


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
