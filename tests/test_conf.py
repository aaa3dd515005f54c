import functools
import itertools
import re
from dataclasses import replace

import inprocess
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from attn_exp.backends.base import load_backend
from attn_exp.cli import dispatch
from attn_exp.config.compose import compose_config, prepare_hydra, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.case.case import Case
from attn_exp.core.catalogue import timers
from attn_exp.core.conf import conf_folder
from attn_exp.core.host import nvml
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.execution.session import Session
from attn_exp.sweep.product import Composer, parsed_combinations

CONF = conf_folder()
FILES = sorted(CONF.rglob("*.yaml"))
# By group. A composition takes a twentieth of a second: the tests choose from all groups at once.
CHOICES = {
    folder.relative_to(CONF).as_posix(): sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted({path.parent for path in FILES} - {CONF})
}
EXPERIMENTS = CHOICES.pop("experiment")
# Latent keys have no fp8: their models come last, the data types first.
CHOICES["model"].reverse()
HEADER = "# @package _global_"
GPU = GpuInfo(index=0, uuid="GPU-0", name="NVIDIA H200")
LIBRARIES = ("cudnn_graph", "fa2", "fa3", "fa4", "flashinfer", "flashmla", "triton", "varlen", "vllm_fa3")
# heads, key-value heads, head_dim, tokens
SHAPES = {
    "gpt2": (12, 12, 64, 1024),
    "sdpa_bench": (16, 16, 128, 1024),
    "llama3_8b": (32, 8, 128, 8192),
    "flux": (24, 24, 128, 4608),
    "gemma4": (16, 2, 512, 8192),
    "gemma4_local": (16, 8, 256, 8192),
    "deepseek_v4": (128, 1, 512, 8192),
    "qwen35": (32, 2, 256, 8192),
}


@pytest.fixture(autouse=True)
def composed(monkeypatch):
    monkeypatch.setattr(nvml, "list_gpus", list)
    prepare_hydra("a_sweep")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def request(*overrides, gpus=()):
    return request_from_config(resolved_config(compose("config", list(overrides))), list(gpus))


def test_a_file_begins_with_a_line_that_says_what_it_is():
    for path in FILES:
        lines = path.read_text().splitlines()
        says = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert says.startswith("# ") and len(says) <= 120, path
        assert len(says.removeprefix("# ").split()) >= 3 or path.parent.name == "dtype", path
        if path.parent.name == "profiler" and path.stem != "none":
            assert lines[0] == f"# @package profiler.{path.stem}"
        if path.parent.name == "experiment":
            assert lines[0] == HEADER and f"+experiment={path.stem}" in says


def test_documents_share_out_all_tokens():
    for tokens in (16, 100, 8191):
        case = request("mask=document", f"seq_len={tokens}").case
        assert len(case.lengths) == 4 and sum(case.lengths) == case.q_len == tokens


@pytest.mark.parametrize("choices", list(itertools.zip_longest(*CHOICES.values())))
def test_every_choice_makes_a_job(choices):
    chosen = {group: choice for group, choice in zip(CHOICES, choices, strict=True) if choice}
    timer = timers().get(chosen.get("timer"))
    device = "cpu" if timer and "cuda" not in timer.devices else "cuda"
    made = request(*(f"{group}={choice}" for group, choice in chosen.items()), f"device={device}", gpus=[GPU])
    assert made.device == device
    for group in chosen.keys() & {"model", "backend", "timer", "isolation"}:
        name = yaml.safe_load((CONF / group / f"{chosen[group]}.yaml").read_text()).get("name")
        assert name == chosen[group].removesuffix("_256"), "a choice has the name that it is chosen by"
    assert made.job.startswith(f"{chosen['backend']}-")
    if chosen.get("profiler", "none") != "none":
        assert [one["name"] for one in made.profilers] == [chosen["profiler"]]
    if timer:
        assert made.measuring.timer == chosen["timer"]
        assert chosen["timer"] not in made.measuring.also


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_makes_a_job(experiment):
    assert request(f"+experiment={experiment}", "device=cpu", gpus=[GPU]).device == "cpu"


@pytest.mark.parametrize("model", SHAPES)
def test_the_models_have_their_published_shapes(model):
    case = request(f"model={model}", "device=cpu").case
    assert (case.q_heads, case.kv_heads, case.head_dim, case.q_len) == SHAPES[model]
    assert case.kv_len == case.q_len
    assert case.value_dim == case.head_dim
    assert {path.stem for path in CONF.glob("model/*.yaml")} >= set(SHAPES)


def test_models_with_latents_have_one_tensor_of_keys_and_values():
    k3, v4 = (request(f"model={name}", "device=cpu", "passes=[forward]").case for name in ("kimi_k3", "deepseek_v4"))
    assert (k3.q_heads, k3.kv_heads, k3.head_dim, k3.value_dim, k3.latent) == (96, 1, 576, 512, True)
    assert (v4.value_dim, v4.latent, v4.window, v4.sink) == (512, True, 128, True)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_heads_of_512_are_refused_with_the_dimensions_that_there_are(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    asked = request("model=gemma4", f"backend={backend}", "dtype=bf16", gpus=[GPU])
    refused = load_backend(asked.backend).unsupported(replace(asked.case, q_len=1), "cuda")
    assert refused is not None and re.search(r"512|grouped heads|latent keys", refused)


@functools.cache
def jobs_of(experiment):
    """Return the cases of a sweep, composed as a sweep composes them: in a tenth of the time of Hydra's own way."""
    loader = GlobalHydra.instance().hydra.config_loader
    given = [f"+experiment={experiment}", "device=cpu"]
    whole = loader.load_configuration("config", given, RunMode.MULTIRUN)
    jobs = parsed_combinations([*given, *(f"{key}={values}" for key, values in whole.hydra.sweeper.params.items())])
    composer = Composer(loader, whole, Session().request, jobs)
    return [composer.request(words).case for words in jobs]


@pytest.mark.parametrize("experiment", ["serving", "paged"])
def test_the_last_pages_of_experiments_are_partial(experiment):
    for case in jobs_of(experiment):
        lengths = case.kv_lengths or (case.kv_len,)
        assert case.page_size is None or any(keys % case.page_size for keys in lengths), case


def test_serving_is_what_servers_have_in_at_most_150_jobs():
    cases = jobs_of("serving")
    assert len(cases) <= 150
    assert {case.q_len for case in cases} >= {1, 2, 4, 8, 16, 512, 1024}
    assert {case.kv_len for case in cases if case.q_len >= 512} == {65530, 131060}
    assert any(case.batch == 128 and case.kv_len == 32760 for case in cases)
    assert any(case.empty_requests for case in cases) and any(case.q_heads == 4 for case in cases)


def test_the_sdpa_sweep_is_the_thirty_configurations():
    config = compose("config", ["+experiment=sdpa_sweep", "device=cpu"], return_hydra_config=True)
    assert config.hydra.mode.name == "MULTIRUN"
    cases = jobs_of("sdpa_sweep")
    heads = {"q_heads": 16, "kv_heads": 16, "head_dim": 128, "value_dim": 128}
    wanted = {
        Case(batch=batch, q_len=length, kv_len=length, causal=causal, dtype="bfloat16", **heads)
        for batch, length, causal in itertools.product((1, 8, 16), (128, 256, 512, 1024, 8192), (True, False))
    }
    assert len(cases) == 30
    assert set(cases) == wanted


@pytest.mark.parametrize(
    ("gpus", "overrides", "dtype", "length"),
    [
        ([GPU], [], "bfloat16", 1024),
        ([GPU], ["device=cpu"], "bfloat16", 1024),
        ([], [], "float32", 256),
        ([], ["dtype=fp16"], "float16", 256),
        ([], ["seq_len=512"], "float32", 512),
        ([], ["model=llama3_8b"], "float32", 8192),
        ([], ["+experiment=cudnn_notebook"], "float16", 1024),
        # Its jobs run where the GPUs are.
        ([], ["hydra/launcher=slurm"], "bfloat16", 1024),
    ],
)
def test_a_host_without_a_gpu_has_small_defaults_and_keeps_choices(monkeypatch, gpus, overrides, dtype, length):
    monkeypatch.setattr(nvml, "list_gpus", lambda: gpus)
    GlobalHydra.instance().clear()
    case = request_from_config(resolved_config(compose_config(overrides, "a")), gpus).case
    assert (case.dtype, case.q_len) == (dtype, length)


def test_the_experiment_of_readme_s_table_has_the_backends_that_run_on_its_gpu():
    config = compose("config", ["+experiment=table", "device=cpu"], return_hydra_config=True)
    backends = config.hydra.sweeper.params.backend.split(",")
    assert backends == ["flash", "cudnn", "aten_cudnn", "cudnn_graph", "efficient", "flex", "triton", "fa3"]


@pytest.mark.parametrize(("gpus", "batch"), [([GPU], 128), ([], 1)])
def test_the_experiment_of_compiling_has_the_shape_of_pytorchs_test_and_on_a_cpu_one_row_of_it(
    monkeypatch, gpus, batch
):
    monkeypatch.setattr(nvml, "list_gpus", lambda: gpus)
    GlobalHydra.instance().clear()
    made = request_from_config(resolved_config(compose_config(["+experiment=compile"], "a")), gpus)
    case = made.case
    assert (case.batch, case.q_heads, case.q_len, case.kv_len, case.head_dim) == (batch, 64, 64, 64, 256)
    assert (case.dtype, made.compile.mode, made.compile.fullgraph) == ("float16", "default", False)


def test_the_first_line_says_that_no_gpu_was_found(monkeypatch, tmp_path, capsys):
    inprocess.typed(monkeypatch, tmp_path)
    for arguments, gpus, first in (
        (["dry_run=true"], [], "No GPU found: measuring the CPU"),
        (["-m", "batch=1,2", "dry_run=true"], [], "No GPU found: measuring the CPU"),
        (["device=cpu", "dry_run=true"], [], None),
        (["dry_run=true"], [GPU], None),
    ):
        monkeypatch.setattr(nvml, "list_gpus", lambda gpus=gpus: gpus)
        GlobalHydra.instance().clear()
        assert dispatch(arguments) == 0
        err = capsys.readouterr().err
        assert "No GPU" not in err if first is None else err.splitlines()[0] == first


def test_the_identity_is_of_what_is_measured_and_of_nothing_else():
    job = request("device=cpu").job
    same = (
        "profiler=none",
        "profiler_limit_mb=1",
        "sweep=other",
        "folder=/elsewhere",
        "tracker=none",
        "isolation=fresh",
        "seq_len=256",
        "backend=auto",
    )
    others = (
        "batch=2",
        "causal=false",
        "dtype=fp16",
        "seed=5",
        "passes=[forward]",
        "stopping.budget_s=2",
        "backend=math",
    )
    assert request("device=cpu", *same).job == job
    assert len({job, *(request("device=cpu", override).job for override in others)}) == len(others) + 1
