"""Keys that nothing reads are told, whoever wrote them; a folder of one's own choices serves every command."""

from dataclasses import replace

import pytest
from fakes import make_record, make_request
from inprocess import typed

from attn_exp.commands.duel import COMMAND as DUEL
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.errors import UserError
from attn_exp.execution.capabilities import ask, configured
from attn_exp.results.result import by_options, result_of
from attn_exp.tracking.base import params

MINE = "_target_: elsewhere.Mine\nname: mine\nscale: null\n"


@pytest.fixture
def own(tmp_path):
    """A folder of one's own choices, with a name that has to be quoted."""
    folder = tmp_path / "it's mine"
    for group, text in (
        ("backend/mine", MINE),
        ("model/wide", "name: wide\nq_heads: 8\nkv_heads: 8\nhead_dim: ${model.width}\nseq_len: 32\nwidth: 16\n"),
        ("compile/mine", "name: mine\nmode: default\nfullgraph: false\noptions: {epilogue_fusion: false}\n"),
        ("tracker/ours", "name: mlflow\nuri: sqlite:///ours.db\nartifacts: here\nmlflow_experiment: ours\n"),
        ("experiment/typo", "# @package _global_\nbacth: 3\n"),
        ("experiment/headless", "batch: 3\n"),
    ):
        path = folder / f"{group}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        (["+pair={b: 7, s: 32}", "batch=${pair.b}", "seq_len=${pair.s}"], 7),
        (["+stopping.mine=5", "batch=${stopping.mine}"], 5),
        (["+rounds=3", "batch=${oc.select:rounds,2}"], 3),
        (["+compile.options.coordinate_descent_tuning=true"], 1),
    ],
)
def test_a_key_that_another_refers_to_is_fine(overrides, batch):
    assert resolved_config(compose_config(overrides, "a"))["batch"] == batch


def test_a_shard_is_named_after_its_model_and_is_the_job_of_its_heads():
    def request(*overrides):
        return request_from_config(resolved_config(compose_config([*overrides, "device=cpu"], "a"), overrides), [])

    shard = request("model=llama3_8b", "tp=8")
    assert (shard.model, shard.config["tp"]) == ("llama3_8b-tp8", 8)
    assert params(shard)["model"] == "llama3_8b-tp8"
    assert shard.job == request("model=llama3_8b", "model.q_heads=4", "model.kv_heads=1").job
    assert request("model=llama3_8b", "tp=1").model == "llama3_8b"


def test_a_width_and_another_head_dim_are_not_both_taken():
    def dim(*overrides):
        config = resolved_config(compose_config(overrides, "a"), overrides)
        return request_from_config(config, []).case.head_dim

    heads = ("model.q_heads=16", "model.kv_heads=16", "device=cpu")
    assert dim("embed_dim=2048", "model.head_dim=128", *heads) == dim("embed_dim=2048", *heads) == 128
    # A model's own is replaced.
    assert dim("embed_dim=2048", "model=llama3_8b", "device=cpu") == 64
    with pytest.raises(UserError, match="embed_dim=2048 is not q_heads x head_dim = 16 x 64: leave embed_dim or"):
        dim("embed_dim=2048", "model.head_dim=64", *heads)


def test_points_of_two_keys_can_be_swept(monkeypatch, tmp_path):
    call = typed(monkeypatch, tmp_path)
    line = ("+pair={b:2,s:32},{b:1,s:64}", "batch=${pair.b}", "seq_len=${pair.s}", "device=cpu", "dry_run=true")
    code, out, _ = call("-m", *line)
    assert code == 0
    assert "2 jobs: 2 would run" in out


def test_a_compilation_of_one_s_own_has_its_name_beside_the_default_and_is_another_job(monkeypatch, tmp_path, own):
    call = typed(monkeypatch, tmp_path)
    line = ("-m", "backend=eager", "compile=default,mine", "device=cpu")
    code, out, _ = call("--config-dir", str(own), *line, "dry_run=true")
    assert (code, [one.split()[0] for one in out.split("would run ")[1:]]) == (0, ["eager+default", "eager+mine"]), out

    def made(*overrides):
        return request_from_config(resolved_config(compose_config([*overrides, "device=cpu"], "a", own)), [])

    mine, other = made("compile=mine"), made("compile=mine", "compile.name=other")
    assert len({mine.job, other.job, made("compile=mine", "compile.name=null").job}) == 3
    stored = [result_of(make_record(request=replace(make_request(), compile=one.compile))) for one in (mine, other)]
    assert stored[0].key != stored[1].key
    assert [result.label for result in by_options(stored)] == ["fake+mine", "fake+other"]
    for overrides, told in (
        (["compile=default", "compile.name=none"], "is a mode"),
        (["compile=default", "compile.name=a/b"], "compile.name=a/b cannot name"),
        (["compile.name=mine"], "need a compilation"),
    ):
        with pytest.raises(UserError, match=told):
            made(*overrides)


def test_mistakes_in_files_of_one_s_own_are_told(monkeypatch, tmp_path, own):
    call = typed(monkeypatch, tmp_path)
    for choice, told in (
        ("typo", "there is no key 'bacth': did you mean 'batch'?"),
        ("headless", "has to begin with the line # @package _global_"),
    ):
        code, _, err = call("--config-dir", str(own), f"+experiment={choice}", "device=cpu")
        assert (code, told in err) == (2, True), err


@pytest.mark.parametrize("flag", [["--config-dir", "X"], ["--config-dir=X"], ["-cd", "X"]])
def test_the_flag_is_taken_as_hydra_takes_it(flag, own):
    given = DUEL.parse(["a=mine", *(word.replace("X", str(own)) for word in flag), "b=eager"])
    assert (given.overrides, given.config_dir) == (("a=mine", "b=eager"), own)
    folder = given.config_dir
    assert compose_config(["backend=mine"], "a", folder).backend.name == "mine"
    config = resolved_config(compose_config(["model=wide", "tracker=ours"], "a", folder))
    assert (config["model"]["head_dim"], config["tracker"]["mlflow_experiment"]) == (16, "ours")


def test_a_folder_that_is_not_there_is_one_sentence(monkeypatch, tmp_path, capsys):
    from attn_exp.commands.backends import main as backends_main
    from attn_exp.commands.duel import main as duel_main
    from attn_exp.commands.log import main as log_main

    monkeypatch.chdir(tmp_path)
    for main, words in (
        (duel_main, ["a=mine", "b=eager"]),
        (backends_main, ["model=gpt2"]),
        (log_main, ["first", "tracker=ours"]),
    ):
        for flag in (["--config-dir", "nope"], ["--config-dir"]):
            assert main([*words, *flag]) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "is not a folder: give one that has backend/, model/ or other groups" in said


def test_a_duel_and_a_replay_find_one_s_own(monkeypatch, tmp_path, own, capsys):
    from attn_exp.commands.duel import main as duel_main
    from attn_exp.commands.log import main as log_main

    monkeypatch.chdir(tmp_path)
    assert duel_main(["--config-dir", str(own), "a=mine", "b=eager", "a.scale=2", "device=cpu", "dry_run=true"]) == 0
    assert "would run a=mine" in capsys.readouterr().out
    assert duel_main(["--config-dir", str(own), "a=mne", "b=eager", "dry_run=true"]) == 2
    assert "did you mean 'mine'?" in capsys.readouterr().err
    (tmp_path / "multirun").mkdir()
    assert log_main(["--config-dir", str(own), "first", "tracker=ours"]) == 2
    assert "there is no sweep 'first'" in capsys.readouterr().err


def test_backends_of_one_s_own_are_asked_and_cannot_silence_the_others(tmp_path, own):
    module = tmp_path / "raises.py"
    module.write_text("class Raises:\n    def __init__(self, name):\n        raise RuntimeError('no licence')\n")
    (own / "backend" / "raises.yaml").write_text("_target_: raises.Raises\nname: raises\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        answers = {answer["name"]: answer for answer in ask(None, own)}
    assert answers["eager"]["missing"] is None
    assert answers["mine"]["missing"].startswith("cannot import backend._target_=elsewhere.Mine")
    assert answers["raises"]["missing"] == "RuntimeError: no licence"


@pytest.mark.parametrize("text", ["", "- a list\n", "name: mine\n", "a: [\n"])
def test_a_file_that_is_no_backend_is_one_sentence(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as told:
        configured(path)
    assert "\n" not in str(told.value)
