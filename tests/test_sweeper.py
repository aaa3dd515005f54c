import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from inprocess import typed
from omegaconf import OmegaConf

from attn_exp.config.compose import prepare_hydra
from attn_exp.core.conf import conf_folder
from attn_exp.core.record.file import write_record
from attn_exp.core.record.record import Record
from attn_exp.execution import capabilities
from attn_exp.execution.context import SweepContext
from attn_exp.execution.session import Session
from attn_exp.sweep.product import Composer
from attn_exp.tracking.base import Tracker

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
        own = OmegaConf.masked_copy(theirs, [name for name in theirs if name != "hydra"])
        assert OmegaConf.to_container(composer.case(overrides)) == OmegaConf.to_container(own), overrides
        if overrides != ["~timer.also"]:
            assert OmegaConf.to_container(composer.case(overrides), resolve=True) == OmegaConf.to_container(
                own, resolve=True
            )


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
def test_overrides_of_all_jobs_are_applied_once_and_change_none_of_them(loader, composer, axes):
    jobs = product(axes)
    together = Composer(loader, master(loader), Session().request, jobs)
    for overrides in [*jobs, *reversed(jobs)]:
        assert OmegaConf.to_container(together.case(overrides)) == OmegaConf.to_container(composer.case(overrides))
        assert str(together.request(overrides)) == str(composer.request(overrides))


def test_an_override_that_hydra_refuses_is_refused(loader, composer):
    whole = master(loader)
    for overrides in WRONG:
        with pytest.raises(HydraException):
            loader.load_sweep_config(whole, overrides)
        with pytest.raises(HydraException):
            composer.case(overrides)
        with pytest.raises(HydraException):
            composer.request(overrides)


def product(axes):
    jobs = [()]
    for axis in axes:
        jobs = [(*job, value) for job in jobs for value in axis]
    return jobs


class FakeSession:
    """Takes the place of the worker and the tracker: what is submitted is done at once."""

    def __init__(self, monkeypatch, folder):
        self.submitted = []
        monkeypatch.setattr(Session, "submit", lambda s, requests, _: self.submit(s, requests, folder))
        monkeypatch.setattr(Session, "close", lambda s, status: self.close(s))
        self.impossible = []

    def submit(self, current, requests, folder):
        current.context = SweepContext("s", folder, Tracker(), {}, print)
        for request in requests:
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


def test_the_command_line_wins_over_what_a_stored_sweep_varies(call, monkeypatch, tmp_path):
    fake = FakeSession(monkeypatch, tmp_path / "s")
    # A group that is not chosen by default needs no plus.
    assert call("experiment=sdpa_sweep", "device=cpu", "batch=2", "seq_len=64,32")[0] == 0
    assert sorted(fake.submitted) == sorted(
        f"auto b2 h16 s{length} d128 bf16 {mask}" for length in (32, 64) for mask in ("causal", "full")
    )


def test_all_backends_are_those_that_can_run_here(call, monkeypatch, tmp_path):
    fake = FakeSession(monkeypatch, tmp_path / "s")
    asked = set()

    def refusals(requests):
        asked.update(one.backend["name"] for one in requests)
        return {one.job: "not here" for one in requests if one.backend["name"] not in ("flash", "math")}

    monkeypatch.setattr(capabilities, "refusals", refusals)
    code, _, err = call("-m", "backend=all", "batch=1,2", "device=cpu", "sweep=s")
    assert (code, err) == (0, f"{len(asked) - 2} of {len(asked)} cannot run here: attn-exp backends\n")
    assert not asked & {"auto", "compiled", "priority", "reference"}
    # The time that is left is that of these.
    assert fake.total == len(fake.submitted) == 4
    assert {label.split()[0] for label in fake.submitted} == {"flash", "math"}


def test_equal_jobs_are_one(call):
    code, out, _ = call("-m", "batch=1,1,2", "backend=math,math", "device=cpu", "dry_run=true")
    assert code == 0 and "2 jobs: 2 would run" in out


def test_an_option_goes_to_the_backends_that_have_it_and_multiplies_only_those(call):
    code, out, err = call(
        "-m", "backend=flash,priority", "backend.order=[math],[flash,math]", "device=cpu", "dry_run=true"
    )
    assert code == 0
    assert "backend.order is no option of flash: they run without it" in err
    assert [out.count(f"would run          {name} ") for name in ("flash", "priority")] == [1, 2]
    code, out, _ = call("-m", "backend=flash,priority", "backend.order=[math]", "device=cpu", "dry_run=true")
    assert (code, out.count("would run ")) == (0, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("backend=flash,math", "sweep=${backend.name}"), "sweep=${backend.name} is one for the whole sweep"),
        (("backend=flash,math", "backend.nope=1"), "the chosen backend has no key 'backend.nope'"),
        (("+experiment=paged,mla",), "+experiment=paged is a sweep of its own: run python -m attn_exp -m +experiment="),
    ],
)
def test_an_option_that_no_single_job_can_have_is_refused_with_what_works(call, words, said):
    code, _, err = call("-m", *words, "device=cpu", "dry_run=true")
    assert code == 2
    assert said in err
