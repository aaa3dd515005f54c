"""Good input, mutated: a clear error or a right answer, and nothing else. `make fuzz` tries ten thousand of each."""

import tempfile
from pathlib import Path

import msgspec
import pytest
import sweeps
from fakes import make_record, make_request
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from mutations import attempt, contents, mutated, texts, trees

from attn_exp.commands.compare import COMMAND
from attn_exp.comparison.answer import chosen
from attn_exp.comparison.choice import Choice
from attn_exp.config.check import explain_error, is_of_composing
from attn_exp.config.compose import prepare_hydra, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import RecordError, UserError
from attn_exp.core.record.request import REQUEST_NAME, Request, read_requests
from attn_exp.execution.session import Session
from attn_exp.results.cell import ChosenMetric, cells_of
from attn_exp.sweep.product import Composer

RECORDS = [
    make_record(),
    sweeps.job("flash"),
    make_record(status="crashed", reason="because", passes={}, metrics={}, request=make_request()),
]
JOBS = [(msgspec.to_builtins(record.request), msgspec.yaml.encode(record.request)) for record in RECORDS[:2]]


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@mutated()
@given(st.sampled_from(JOBS).flatmap(lambda job: contents(*job)))
def test_a_mutated_request_is_refused_or_read(folder, content):
    (folder / REQUEST_NAME).write_bytes(content)
    found, refusal = attempt(lambda: read_requests(folder), RecordError)
    if refusal is not None:
        assert REQUEST_NAME in refusal
        return
    assert [type(request) for request, _ in found] == [Request]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    records = [
        sweeps.job(backend, of=sweeps.case(seq_len=length)) for backend in ("flash", "cudnn") for length in (512, 4096)
    ]
    records += [sweeps.failed(backend="math"), sweeps.job("flex", options={"block": 64, "order": ["a", "b"]})]
    return cells_of(sweeps.sweep(tmp_path_factory.mktemp("fuzz") / "s", records).results, ChosenMetric())


WHERE = [
    "causal and seq_len >= 4096",
    "backend in (flash, cudnn) or not drift",
    "not (time_us > 1e2 and dtype == bf16)",
    "backend.block >= 64 and window == none",
    "q_len != kv_len or gpu_uuid == 'GPU-1'",
]
WORDS = ["and", "or", "not", "in", "(", ")", "==", "<", ">=", ",", "'", '"', "1e9", "-1", "none", "true", "flash", " "]


@mutated()
@given(texts(WHERE, [*WORDS, "time_us", "backend.order", "job", "9" * 400, "1e999", "("*60]))  # fmt: skip
def test_a_mutated_filter_is_refused_or_chooses_among_what_is_there(cells, text):
    found, refusal = attempt(lambda: chosen(cells, text), UserError)
    if refusal is not None:
        assert "where=" in refusal
        return
    assert found and set(map(id, found)) <= set(map(id, cells))


ASKED = [
    "first", "against=old", "baseline=flash", "by=dtype,causal", "margin=3%", "rows=20", "format=json",
    "--fail-if-slower=3%", "history", "sort=time_us", "metric=tflops", "spread=1%",
    "where=causal", "multirun/first", "plots=true", "anyway=true",
]  # fmt: skip


@mutated()
@given(st.lists(texts(ASKED, ["=", "%", ",", "/", "-", "sweep", "9" * 400, "٣", "1e9", "²"]) | st.sampled_from(ASKED)))
def test_mutated_words_of_a_comparison_are_refused_or_a_choice(words):
    choice, refusal = attempt(lambda: COMMAND.parse(["first", *words]), UserError)
    assert refusal or isinstance(choice, Choice)


@pytest.fixture(scope="module")
def composer():
    prepare_hydra("a_sweep")
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        loader = GlobalHydra.instance().hydra.config_loader
        from hydra.types import RunMode

        master = loader.load_configuration("config", ["device=cpu"], RunMode.MULTIRUN)
        yield Composer(loader, master, Session().request)
    GlobalHydra.instance().clear()


@pytest.fixture(scope="module")
def composed(composer):
    return resolved_config(composer.case([]))


@mutated()
@given(st.data())
def test_a_mutated_configuration_is_refused_or_a_request(composed, data):
    config = data.draw(trees(composed))
    request, refusal = attempt(lambda: request_from_config(config, []), UserError)
    assert refusal or msgspec.yaml.decode(msgspec.yaml.encode(request), type=Request) == request


TYPED = [
    "batch=8", "seq_len=512", "causal=false", "model.q_heads=16", "passes=[forward]", "stopping.budget_s=0.1",
    "+backend.window=[1,2]", "~timer.also", "++seed=9", "stop_on=[inaccurate]", "lengths=[512,1536]", "sweep=first",
    "softcap=30.0", "window=128", "+pair={b:32,s:512}", "kv_len=${q_len}", "l2=written", "regime=burst",
]  # fmt: skip


@mutated()
@given(st.lists(texts(TYPED, ["=", "[", "]", "{", "}", "${", ",", "'", '"', "null", "1e3", "~", "+", ".", "9" * 30]),
                min_size=1, max_size=3))  # fmt: skip
def test_mutated_overrides_are_refused_in_a_sentence_or_a_request(composer, overrides):
    def ask():
        try:
            return composer.request(overrides)
        except Exception as error:
            if is_of_composing(error):
                return UserError(explain_error(error))
            raise

    found, refusal = attempt(ask, UserError)
    assert refusal or isinstance(found, (Request, UserError))
