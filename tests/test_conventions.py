"""What people who use MLflow expect of it: its variables, its filters, and words of their own that stay."""

import re
import shutil
from pathlib import Path

import cli
import inprocess
import pytest
import sweeps

from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.log import main as log_main
from attn_exp.config.compose import new_sweep_name
from attn_exp.tracking.client import legal, silence

ARGUMENTS = ("-m", *cli.TRACKED, "backend=math,flash", "seq_len=32,64", "sweep=s")
JOB = "math s32 b1 causal h2 d16 fp32 (s)"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A sweep inside of a run of its user's, with MLflow's own variables, and the same command again after edits."""
    folder: Path = tmp_path_factory.mktemp("logged")
    uri = f"sqlite:///{folder}/store.db"
    client = client_of(uri)
    surrounding = client.create_run(client.create_experiment("mine"), run_name="training").info.run_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
        patch.setenv("MLFLOW_RUN_ID", surrounding)
        patch.setattr("attn_exp.worker.__main__.limit_memory", lambda: None)
        typed = inprocess.typed(patch, folder)
        code, _, said = typed(*ARGUMENTS, "isolation=none")
        assert code == 0, said
        parent, job = (
            run(client, f"attributes.run_name = '{name}'") for name in ("s", "math s32 b1 causal h2 d16 fp32 (s)")
        )
        for one in (parent, job):
            client.set_tag(one.info.run_id, "mlflow.note.content", "our words")
            client.set_tag(one.info.run_id, "team", "kernels")
        client.update_run(parent.info.run_id, name="our name")
        assert typed(*ARGUMENTS)[0] == 0
    return client, surrounding, said, folder


def client_of(uri):
    # Not above: processes that import this module would import MLflow before it is silenced.
    silence()
    from mlflow import MlflowClient

    return MlflowClient(uri)


def run(client, condition):
    experiment = client.get_experiment_by_name("mine")
    (found,) = client.search_runs([experiment.experiment_id], condition)
    return found


def test_mlflow_s_variables_choose_store_and_experiment_and_the_first_line_says_so(logged):
    client, _, said, folder = logged
    assert f"logging to MLflow at sqlite:///{folder}/store.db, experiment mine" in said.splitlines()[:2]
    assert not (folder / "mlruns" / "mlflow.db").exists()
    assert len(client.search_runs([client.get_experiment_by_name("mine").experiment_id])) == 6


def test_a_surrounding_run_is_the_parent(logged):
    client, surrounding, *_ = logged
    assert run(client, "tags.`attn_exp.kind` = 'sweep'").data.tags["mlflow.parentRunId"] == surrounding


def test_sizes_filter_as_numbers(logged):
    client, *_ = logged
    experiment = client.get_experiment_by_name("mine").experiment_id
    found = client.search_runs([experiment], "metrics.`case/seq_len` > 32 and params.backend = 'flash'")
    assert [one.data.params["seq_len"] for one in found] == ["64"]


def test_a_run_has_its_source(logged):
    client, *_ = logged
    found = run(client, "attributes.run_name = 'flash s64 b1 causal h2 d16 fp32 (s)'")
    assert found.data.tags["mlflow.source.type"] == "LOCAL"


def test_words_that_somebody_edited_stay(logged):
    client, *_ = logged
    for name in ("our name", JOB):
        kept = run(client, f"attributes.run_name = '{name}'")
        assert kept.data.tags["mlflow.note.content"] == "our words"
        assert kept.data.tags["team"] == "kernels"
    others = run(client, "attributes.run_name = 'flash s32 b1 causal h2 d16 fp32 (s)'")
    assert "the sweep's answer" in others.data.tags["mlflow.note.content"]


def test_every_name_is_one_that_mlflow_accepts_and_none_is_lost():
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    keys = ("a+b", "a_b", "a//b", "a/b", "../x", "hf://org/model,s3://x", "/abs", ".", "x" * 400, "forward/time_us")
    given = {key: str(place) for place, key in enumerate(keys)}
    named = legal(given)
    for name in named:
        _validate_metric_name(name)
        _validate_param_name(name)
    assert sorted(named.values()) == sorted(given.values())
    assert named["forward/time_us"] == given["forward/time_us"]


def test_a_sweep_without_a_name_is_named_by_its_time_and_by_what_it_varies():
    words = ["-m", "backend=flash,math", "model.head_dim=range(64,128,64)", "batch=1", "passes=[forward,backward]"]
    assert re.fullmatch(r"[\d-]{10}_[\d-]{8}-backend-head_dim-[0-9a-f]{4}", new_sweep_name(arguments=words))
    assert re.fullmatch(r"[\d-]{10}_[\d-]{8}-[0-9a-f]{4}", new_sweep_name(arguments=["batch=1"]))


def test_a_folder_that_is_deleted_in_the_middle_ends_the_sweep_with_one_sentence(tmp_path):
    process = cli.start("-m", *cli.QUICK, "backend=math,flash", "batch=range(1,40)", "sweep=s", cwd=tmp_path)
    cli.wait_for(lambda: list(tmp_path.glob("multirun/s/*/record.json")))
    (tmp_path / "multirun/s").rename(tmp_path / "elsewhere")
    out, err = process.communicate(timeout=300)
    (told,) = cli.without_progress(err)
    folder = tmp_path / "multirun/s"
    assert (process.returncode, out) == (2, "")
    assert told.startswith(f"attn-exp: {folder} was moved or deleted: move it back, then finish with: ")


URI = "uri=sqlite:///mlruns/mlflow.db"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with the store of a sweep of two jobs, which takes seconds to make."""
    folder = tmp_path_factory.mktemp("original")
    sweeps.write(folder / "multirun/s", [sweeps.job("flash", 100.0), sweeps.job("math", 300.0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert log_main(["s"]) == 0
    return folder


@pytest.fixture
def stored(original, tmp_path, monkeypatch):
    """A client of a copy of that store, to change."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return client_of(f"sqlite:///{tmp_path}/mlruns/mlflow.db")


def kinds(client, experiment="attn_exp"):
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {run.data.tags["attn_exp.kind"] for run in found}, found


def test_jobs_whose_sweep_s_run_was_deleted_are_stored_once(stored, capsys):
    (parent,) = [run.info.run_id for run in kinds(stored)[1] if run.data.tags["attn_exp.kind"] == "sweep"]
    stored.delete_run(parent)
    capsys.readouterr()
    assert log_main(["s"]) == 0
    assert "2 records, 0 new, 2 there already" in capsys.readouterr().out
    there = {run.info.run_id: run.data.tags for run in kinds(stored)[1]}
    (new,) = [run for run, tags in there.items() if tags["attn_exp.kind"] == "sweep"]
    assert [tags.get("mlflow.parentRunId") for tags in there.values()].count(new) == len(there) - 1 == 2


def test_a_renamed_experiment_is_found(stored):
    stored.rename_experiment(stored.get_experiment_by_name("attn_exp").experiment_id, "attention of 2026")
    assert log_main(["s"]) == 0
    assert stored.get_experiment_by_name("attn_exp") is None and len(kinds(stored, "attention of 2026")[1]) == 3
    assert compare_main(["s", URI]) == 0


def test_a_deleted_experiment_is_named_with_the_key_that_chooses_another(stored, capsys):
    stored.delete_experiment(stored.get_experiment_by_name("attn_exp").experiment_id)
    for ended in (log_main(["s"]), compare_main(["s", URI])):
        assert ended == 2
    told = capsys.readouterr().err.splitlines()
    wanted = "MLflow's experiment attn_exp is deleted: restore it, or choose another: mlflow_experiment=NAME"
    assert [line.partition(": ")[2] for line in told] == [wanted, wanted]


def test_another_place_for_the_files_of_an_experiment_that_exists_is_refused(
    stored, original, tmp_path, monkeypatch, capsys
):
    assert log_main(["s", f"tracker.artifacts={tmp_path}/elsewhere"]) == 2
    assert f"has its files in {original}/mlruns/artifacts: leave tracker.artifacts=" in capsys.readouterr().err
    code, _, err = inprocess.typed(monkeypatch, tmp_path)(*ARGUMENTS, f"tracker.artifacts={tmp_path}/elsewhere")
    assert code == 2 and "has its files in" in err.splitlines()[-1]


def test_a_sweep_of_which_nothing_is_stored_does_not_succeed(stored, tmp_path, monkeypatch):
    stored.delete_experiment(stored.get_experiment_by_name("attn_exp").experiment_id)
    # Nothing but records can be lacking: none is measured.
    words = (*cli.TRACKED, "backend=cudnn", "isolation=none", "sweep=other")
    code, out, _ = inprocess.typed(monkeypatch, tmp_path)(*words)
    assert code == 1 and "lacks 1 record (MLflow's experiment attn_exp is deleted" in out
