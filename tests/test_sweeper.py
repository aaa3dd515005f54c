import contextlib
import copy
import os
import time
from typing import ClassVar

import pytest
from cli import QUICK, complaints, records, run
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from inprocess import typed
from omegaconf import OmegaConf

from attn_exp.config.compose import prepare_hydra
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.record import Record
from attn_exp.core.record_file import FILE_NAME, write_record
from attn_exp.core.request import Request
from attn_exp.run.context import SweepContext
from attn_exp.run.session import Session
from attn_exp.sweep.product import Composer, check_choices
from attn_exp.tracking.none import NoTracker

SPREAD = [
    [],
    ["batch=2"],
    ["backend=flash", "batch=8"],
    ["batch=8", "backend=flash", "seq_len=64", "backend=math"],
    ["model=llama3_8b", "model.q_heads=16", "dtype=fp32", "compile=default"],
    ["stopping.budget_s=0.1", "stopping.min_rounds=3"],
    ["passes=[forward]", "timer=cpu", "timer.also=[]"],
    ["+backend.window=[1,2]", "+backend.options={a:1,b:{c:x}}"],
    ["++seed=9", "++backend.window=4"],
    ["~timer.also"],
    ["seed=5", "~seed=5", "+seed=6"],
    ["~isolation"],
    ["+pair={b:32,s:512}", "batch=${pair.b}", "seq_len=${pair.s}"],
    ["+pair={b:1,s:16384}", "batch=${pair.b}", "seq_len=${pair.s}"],
    ["model={q_heads:6,kv_heads:2}"],
    ["model.q_heads=3", "model={q_heads:6,kv_heads:2}", "batch=3"],
    ["+experiment=flux", "batch=2"],
    ["+experiment=sdpa_sweep", "batch=1", "causal=false", "seq_len=128", "backend=math"],
    ["backend=eager", "backend._target_=their.Own", "backend.name=own"],
    ["hydra.job.name=other", "batch=2"],
    ["hydra.verbose=true", "folder=elsewhere", "sweep=named"],
    ["q_len=1", "kv_len=${q_len}", "tracker=none", "tracker.name='a b'"],
]
WRONG = [
    ["backend=nope"],
    ["bach=1"],
    ["model.nope=1"],
    ["+batch=2"],
    ["~nope"],
    ["~seed=7"],
    ["experiment=flux"],
    ["nope@here=1"],
]


@pytest.fixture
def loader():
    prepare_hydra("a_sweep")
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        yield GlobalHydra.instance().hydra.config_loader
    GlobalHydra.instance().clear()


@pytest.fixture
def composer(loader):
    return Composer(loader, master(loader), Session().request)


@pytest.fixture
def call(monkeypatch, tmp_path):
    return typed(monkeypatch, tmp_path)


def master(loader):
    # With overrides of Hydra's own on the command line, which every job inherits.
    return loader.load_configuration("config", ["device=cpu", "hydra.job.num=3"], RunMode.MULTIRUN)


def test_a_job_is_composed_as_hydra_composes_it(loader, composer):
    whole = master(loader)
    every = [loader.load_sweep_config(whole, overrides) for overrides in SPREAD]
    for overrides, theirs in [*zip(SPREAD, every, strict=True), *reversed(list(zip(SPREAD, every, strict=True)))]:
        ours = composer.compose(overrides)
        assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs), overrides
        assert ours.hydra.overrides.task == theirs.hydra.overrides.task
        own = OmegaConf.masked_copy(theirs, [name for name in theirs if name != "hydra"])
        assert OmegaConf.to_container(composer.case(overrides)) == OmegaConf.to_container(own), overrides
        if overrides != ["~timer.also"]:
            assert OmegaConf.to_container(composer.case(overrides), resolve=True) == OmegaConf.to_container(
                own, resolve=True
            )


def test_a_job_is_asked_for_as_its_configuration_says_whatever_was_asked_before(composer):
    for overrides in [*SPREAD, *WRONG, *reversed(SPREAD), *SPREAD[::2]]:
        if overrides in WRONG:
            with pytest.raises(HydraException):
                composer.request(overrides)
            continue
        try:
            wanted = Session().request(composer.case(overrides))
        except UserError as error:
            wanted = str(error)
        found = composer.request(overrides)
        assert (str(found) if isinstance(found, UserError) else found) == wanted, overrides


AXES = [
    [["batch=1", "batch=2"], ["seq_len=64"], ["backend=flash", "backend=math"], ["seed=5"]],
    # What a choice changes as well is not applied beforehand.
    [["backend.name=own"], ["backend=flash", "backend=math"], ["+backend.window=3"], ["backend._target_=their.Own"]],
    [["model.q_heads=6"], ["model={q_heads:12,kv_heads:2}", "model={q_heads:8,kv_heads:2}"], ["model.kv_heads=4"]],
    [["+pair={b:32,s:512}", "+pair={b:1,s:1024}"], ["batch=${pair.b}"], ["seq_len=${pair.s}"]],
    [["seed=5"], ["~seed"], ["+seed=5"], ["~timer.also"], ["+timer.also=[wall]"], ["batch=1", "batch=8"]],
    [["q_len=1"], ["kv_len=${q_len}"], ["causal=true", "causal=false"]],
    [["+pair={b:1,s:2}"], ["pair.b=3"], ["batch=${pair.b}"], ["seed=1", "seed=2"]],
]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_all_jobs_share_is_applied_once_and_changes_none_of_them(loader, composer, axes):
    jobs = product(axes)
    together = Composer(loader, master(loader), Session().request, jobs)
    for overrides in [*jobs, *reversed(jobs)]:
        assert OmegaConf.to_container(together.case(overrides)) == OmegaConf.to_container(composer.case(overrides))
        assert str(together.request(overrides)) == str(composer.request(overrides))


@pytest.mark.parametrize(
    ("axes", "refused"),
    [
        ([["+model.window=32", "+model.window=64"], ["+window=512"]], [True, True]),
        ([["seq_len=5", "seq_len=6"], ["~kv_len=5"]], [False, True]),
    ],
    ids=str,
)
def test_what_looks_at_another_choice_is_refused_where_hydra_refuses_it(loader, axes, refused):
    jobs, whole = product(axes), master(loader)
    together = Composer(loader, whole, Session().request, jobs)
    for overrides, wrong in zip(jobs, refused, strict=True):
        for compose in (lambda texts: loader.load_sweep_config(whole, list(texts)), together.request):
            with pytest.raises(HydraException) if wrong else contextlib.nullcontext():
                compose(overrides)


def test_what_hydra_refuses_is_refused(loader, composer):
    whole = master(loader)
    for overrides in WRONG:
        with pytest.raises(HydraException):
            loader.load_sweep_config(whole, overrides)
        with pytest.raises(HydraException):
            composer.compose(overrides)
        with pytest.raises(HydraException):
            composer.request(overrides)


def test_a_job_leaves_no_trace_in_the_next_one(composer):
    plain = copy.deepcopy(composer.compose(["backend=flash"]))
    composer.compose(["backend=flash", "+backend.window=3", "model.q_heads=4", "timer.also=[event]"])
    composer.case(["backend=flash", "+backend.window=3", "~seed"])
    assert composer.compose(["backend=flash"]) == plain


def test_group_choices_are_composed_once_whatever_the_grid_is(loader, composer, monkeypatch):
    composed = []
    whole = loader.load_sweep_config
    monkeypatch.setattr(
        loader, "load_sweep_config", lambda master, texts: composed.append(texts) or whole(master, texts)
    )
    for backend in ("flash", "math"):
        for batch in range(1, 20):
            assert isinstance(composer.request([f"backend={backend}", f"batch={batch}"]), Request)
    assert composed == [["backend=flash"], ["backend=math"]]


@pytest.mark.parametrize(
    "axes",
    [
        [["batch=1", "batch=x"], ["seq_len=64", "seq_len=32"]],
        [["batch=1", "batch=2"], ["seq_len=64", "seq_len=32", "seq_len=-1"]],
        [["model=gpt2"], ["model.kv_heads=4", "model.kv_heads=5"]],
        [["device=cpu", "device=cuda"], ["batch=1", "batch=2"]],
        [["timer=cpu", "timer=kernel"]],
    ],
    ids=str,
)
def test_a_value_that_is_wrong_in_every_combination_is_found_first(composer, axes):
    with pytest.raises(UserError):
        check_choices(composer.request, product(axes))


@pytest.mark.parametrize("name", ["backend=nope", "bach=1"])
def test_hydras_own_errors_pass_through_the_check(composer, name):
    with pytest.raises(HydraException):
        check_choices(composer.request, product([["batch=1"], ["seed=1", name]]))


def test_values_that_are_possible_in_some_combination_pass(composer):
    # kv_heads=3 divides 12 heads but not 16, kv_heads=8 the other way round, and the first combination is impossible.
    axes = [["model.q_heads=12", "model.q_heads=16"], ["model.kv_heads=8", "model.kv_heads=3", "model.kv_heads=4"]]
    check_choices(composer.request, product(axes))


def product(axes):
    jobs = [()]
    for axis in axes:
        jobs = [(*job, value) for job in jobs for value in axis]
    return jobs


def test_the_check_asks_for_each_value_and_not_for_each_combination(composer):
    asked = []
    axes = [[f"{key}={value}" for value in range(1, 21)] for key in ("batch", "seed", "seq_len")]
    check_choices(lambda overrides: asked.append(overrides) or composer.request(overrides), product(axes))
    assert len(set(asked)) == 3 * 19 + 1


class FakeSession:
    """Takes the place of the worker and the tracker: what is submitted is done at once."""

    def __init__(self, monkeypatch, folder):
        self.submitted, self.kept = [], []
        monkeypatch.setattr(Session, "submit", lambda s, request, _: self.submit(s, request, folder))
        monkeypatch.setattr(Session, "keep", lambda s, record, _: self.kept.append(record.request.label))
        monkeypatch.setattr(Session, "close", lambda s, status: self.close(s))
        self.impossible = []

    def submit(self, current, request, folder):
        current.context = SweepContext("s", folder, NoTracker(), {}, print)
        (folder / request.job).mkdir(parents=True, exist_ok=True)
        write_record(Record(request=request, status="unsupported", reason="not here"), folder / request.job)
        self.submitted.append(request.label)
        return 0.0

    def close(self, current):
        self.impossible = list(current.impossible)
        self.total = current.progress.total


def test_impossible_combinations_are_left_out_and_named(call, monkeypatch, tmp_path):
    fake = FakeSession(monkeypatch, tmp_path / "s")
    arguments = ("-m", "device=cpu", "model.q_heads=12,16", "model.kv_heads=8,3,4", "sweep=s")
    assert call(*arguments) == (0, "", "")
    assert len(fake.submitted) == fake.total == 4
    assert len(fake.impossible) == 2
    assert fake.impossible[0].startswith("device=cpu model.q_heads=12 model.kv_heads=8 sweep=s: kv_heads=8 does not")
    assert "model.q_heads=16 model.kv_heads=3" in fake.impossible[1]


def test_done_jobs_are_skipped_without_hydras_launch(call, monkeypatch, tmp_path):
    arguments = ("-m", "device=cpu", "backend=flash,math", "batch=range(1,11)", "sweep=s")
    first = FakeSession(monkeypatch, tmp_path / "s")
    assert call(*arguments)[0] == 0
    assert len(set(first.submitted)) == 20
    gone = sorted((tmp_path / "s").glob(f"*/{FILE_NAME}"))[:2]
    for path in gone:
        path.unlink()
    # Only the first job goes the long way: it opens the sweep.
    again = FakeSession(monkeypatch, tmp_path / "s")
    assert call(*arguments)[0] == 0
    assert 2 <= len(again.submitted) <= 3
    assert len(again.submitted) + len(again.kept) == 20


def test_the_command_line_wins_over_what_a_stored_sweep_varies(call, monkeypatch, tmp_path):
    fake = FakeSession(monkeypatch, tmp_path / "s")
    assert call("+experiment=sdpa_sweep", "device=cpu", "batch=2", "seq_len=64,32")[0] == 0
    assert sorted(fake.submitted) == sorted(
        f"auto b2 h16 s{length} d128 bf16 {mask}" for length in (32, 64) for mask in ("causal", "full")
    )


class Told(Callback):
    """A callback of the user's own."""

    heard: ClassVar[list[str]] = []

    def on_job_start(self, config, **_):
        self.heard.append(f"{config.hydra.job.num} {' '.join(config.hydra.overrides.task)}")


def test_hydras_callbacks_and_environment_are_kept_where_somebody_set_them(call, monkeypatch, tmp_path):
    fake = FakeSession(monkeypatch, tmp_path / "s")
    arguments = ("-m", "device=cpu", "batch=1,2", "sweep=s")
    assert call(*arguments, "+hydra.callbacks.told._target_=test_sweeper.Told")[0] == 0
    import test_sweeper

    assert test_sweeper.Told.heard == [f"{index} device=cpu batch={index + 1} sweep=s" for index in (0, 1)]
    assert len(fake.submitted) == 2

    set_to = []
    fake = FakeSession(monkeypatch, tmp_path / "t")
    submit = fake.submit
    fake.submit = lambda *given: set_to.append(os.environ.get("OF_THE_USER")) or submit(*given)
    assert call(*arguments, "+hydra.job.env_set.OF_THE_USER=yes")[0] == 0
    assert set_to == ["yes", "yes"]
    assert "OF_THE_USER" not in os.environ


def test_a_sweep_that_was_stopped_at_an_inaccurate_job_stops_there_again(tmp_path):
    """Typed again it neither goes on behind it nor ends as if all were well."""
    (tmp_path / "conf" / "backend").mkdir(parents=True)
    wrong = "_target_: fakes.NoMask\nname: wrong\n"
    (tmp_path / "conf" / "backend" / "wrong.yaml").write_text(wrong)
    arguments = ("--config-dir", "conf", "-m", *QUICK, "backend=flash,wrong,eager", "batch=1", "sweep=s")
    for _ in range(2):
        done = run(*arguments, "stop_on=[inaccurate]", cwd=tmp_path)
        assert (done.returncode, complaints(done)) == (1, [])
        assert "stopped at the first inaccurate job (stop_on), wrong-" in done.stdout
        assert sorted(name.split("-")[0] for name in records(tmp_path, "s")) == ["flash", "wrong"]
    assert run(*arguments, cwd=tmp_path).returncode == 0


def test_a_grid_that_nobody_waits_for_is_refused_before_it_is_made(call):
    began = time.monotonic()
    code, out, err = call("-m", "batch=range(1,1000000000)", "causal=true,false", "device=cpu")
    assert (code, out) == (2, "") and time.monotonic() - began < 5
    assert "1,999,999,998 combinations, of 999,999,999 values of batch, are more than 100,000" in err
    code, out, err = call("-m", "batch=range(1,9,3)", "device=cpu", "backend=math", "dry_run=true")
    assert (code, err) == (0, "") and "3 jobs: 3 would run" in out


def test_equal_jobs_are_one(call):
    code, out, _ = call("-m", "batch=1,1,2", "backend=math,math", "device=cpu", "dry_run=true")
    assert code == 0 and "2 jobs: 2 would run" in out
