"""Links in a sweep's folder: what they lead to stays as it is, whatever the sweep writes in their place."""

import shutil

import cli
import pytest

WORDS = ("-m", "backend=math,eager", "profiler=torch", "sweep=s", *cli.QUICK, "save_plots=true")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a sweep that wrote all that a sweep writes, and the paths of it."""
    place = tmp_path_factory.mktemp("written")
    assert cli.run(*WORDS, cwd=place).returncode == 0
    sweep = place / "multirun" / "s"
    return place, sorted(path.relative_to(sweep) for path in sweep.rglob("*"))


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_a_link_in_the_place_of_each_path_that_a_sweep_writes_is_not_written_to(written, kind, tmp_path):
    place, paths = written
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    sweep, outside = tmp_path / "multirun" / "s", tmp_path / "outside"
    shutil.copytree(sweep, outside)
    for path in outside.rglob("*"):
        if path.is_file():
            path.write_text("somebody's")
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    planted = [path for path in paths if (sweep / path).is_dir() == (kind == "folders")]
    for path in planted:
        if not any(parent in planted for parent in path.parents):
            shutil.rmtree(sweep / path) if kind == "folders" else (sweep / path).unlink()
            (sweep / path).symlink_to(outside / path)
    cli.run(*WORDS, "seed=1", cwd=tmp_path)
    done = cli.run(*WORDS, cwd=tmp_path)
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before, done.stderr
