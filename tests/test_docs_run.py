"""Run every command of the documentation that needs no GPU, with small sizes."""

import json
import os
import re
import subprocess
import sys

import pytest
from inprocess import typed
from test_docs import GPU, NOTES, ROOT, but_for_names, commands, of_command, write_examples
from test_identity import JOBS

from attn_exp.commands import worker
from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.duel import main as duel_main
from attn_exp.commands.explain import main as explain_main
from attn_exp.commands.log import main as log_main
from attn_exp.core.host import nvml
from attn_exp.core.record.file import read_record
from attn_exp.execution import context
from attn_exp.execution.isolation import InProcess
from attn_exp.execution.worker import Worker

START = Worker.start
# Commands that cannot run here, by a part of their text, and where they are tested instead.
NOT_RUN = {
    "docker": "there is no Docker: tests/test_docker.py, tests/test_server.py",
    "tar -xf results/": "tests/test_kept_records.py reads every archive",
    "mkdir -p docker/secrets": "it makes a secret for Docker",
    "export": "a server's variables: tests/servers.py sets them",
    "mlflow server": "tests/servers.py starts it with these flags",
    "make": "targets are checked by tests/test_docs.py; CI runs make test",
    "pip install": "tests/test_packaging.py and tests/test_examples.py install, into folders of their own",
    "pip wheel": "tests/test_packaging.py builds",
    "attn-exp -sc": "tests/test_packaging.py presses TAB",
    "docs/embed.py": "tests/test_docs.py checks what it writes",
    "bench/": "minutes on GPUs, or pictures with a browser",
    "tracker=server": "tests/test_server.py has a real server",
    "deepseek_v3_mla": "its values are 512 of 576 channels, which do not shrink by themselves: tests/test_latent.py",
    "+experiment=ten_way": "44 jobs of 12,288 queries, for a GPU; tests/test_conf.py composes it",
    "hydra/launcher=": "tests/test_launchers.py has stand-ins for GPUs and Slurm, and a Ray",
    "device=cuda": "needs a GPU: tests/gpu",
    "profiler=[": "needs a GPU: tests/gpu/test_gpu_profilers.py, tests/gpu/test_gpu_ncu.py",
    "compile=": "compiling takes a minute: tests/test_compilation.py, tests/test_inductor.py",
    "+experiment=compile": "it compiles every backend: tests/test_compilation.py",
    "+experiment=table": "its sizes are for a GPU",
    "+experiment=determinism": "its backends are for a GPU: tests/test_determinism.py measures",
    "+experiment=flux": "it compiles and profiles: tests/test_inductor.py, tests/gpu/test_gpu_profilers.py",
    "workload=decoder_layer": "tests/test_workloads.py",
    "attn-exp doctor": "half a minute: tests/test_doctor.py",
    "attn-exp pick": "tests/test_pick.py picks from sweeps",
    "sweep=models": "it is the sweep of a GPU that tests/test_pick.py stands in for",
    "backend=sage": "its dtype is for a GPU: tests/test_int8.py",
    "attn-exp hunt": "it searches for a minute: tests/test_hunt.py",
    "attn-exp bisect": "it installs packages: tests/test_bisect.py",
    "attn-exp reproduce": "its sizes are for a GPU: tests/test_reproduce.py",
    "attn-exp ui": "tests/test_ui.py starts its server",
    "attn-exp --help": "tests/test_cli.py reads it",
}
# These compute on a CPU whatever they are given here; others may be `unsupported` or `unavailable`, in a sentence.
EVERYWHERE = {"flash", "math", "eager", "efficient", "mine", "sliced", "slicedattention", "myattention", "auto"}
# The commands whose arguments stand on standard input; tests/test_own_choices.py has one that starts a process to ask.
OVERVIEWS = """
import contextlib, io, json, sys
import msgspec
from attn_exp.commands.backends import main
from attn_exp.execution import capabilities
from attn_exp.worker.capabilities import Question, answer

def answered(module, question):
    asked = msgspec.convert(msgspec.to_builtins(question), Question)
    return msgspec.json.encode(list(map(answer, asked.backends, asked.jobs)))

capabilities.answer_of = answered
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    print(json.dumps([code, out.getvalue()]))
"""
# The line of a job that has ended, with notes about its profilers.
PROGRESS = re.compile(r"\s*\[\s*\d+/\d+\] |      profiler=")
SMALL = {
    "device": "cpu", "isolation": "none", "tracker": "none", "save_plots": "false", "seq_len": "32", "dtype": "fp32",
    "model.q_heads": "2", "model.kv_heads": "2", "model.head_dim": "16", "stopping.min_rounds": "2",
    "stopping.max_rounds": "2", "stopping.budget_s": "0.01",
}  # fmt: skip
WORDS = sorted({tuple(words) for words in commands()})


def reasons(words):
    """Return why a command is not run here; an empty list if it is."""
    return [reason for fragment, reason in NOT_RUN.items() if fragment in " ".join(words)]


def run_here(name):
    """Return the arguments of this command's lines that are run here."""
    return sorted({tuple(arguments) for arguments in of_command(name) if not reasons(["attn-exp", name, *arguments])})


# tests/test_identity.py has the names of the jobs of some.
NOT_HERE = [
    words
    for words in but_for_names(sorted(set(map(tuple, of_command("run"))) - set(run_here("run"))))
    if " ".join(word for word in words if not word.startswith("sweep=")) not in JOBS
]


def shrunk(words):
    """Return the words with small lengths, and with `SMALL` for the keys that they do not set."""
    small = [re.sub(r"^(seq_len|q_len|kv_len|window)=([\d,]+)$", _short, word) for word in words]
    # A pair's sequence lengths.
    small = [re.sub(r"\bs:\d+", "s:32", word) if word.startswith("+pair=") else word for word in small]
    # A CPU takes seconds for the ceilings of each other type.
    small = [re.sub(r"^dtype=(fp16|bf16)$", "dtype=fp32", word) for word in small]
    given = {re.split(r"[+=]+", word.lstrip("+"))[0] for word in small}
    more = {key: value for key, value in SMALL.items() if key not in given}
    if given & {"q_len", "kv_len", "lengths"}:
        del more["seq_len"]
    if "+experiment=sdpa_sweep" in words:
        more["model.embedding"] = "32"
    return [*small, *(f"{key}={value}" for key, value in more.items())]


def _short(match):
    lengths = [int(length) for length in match[2].split(",")]
    return f"{match[1]}={','.join(str(min(length, 16 * (i + 1))) for i, length in enumerate(lengths))}"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a folder with the pages' files and modules, and a function that runs a command in it."""
    folder = tmp_path_factory.mktemp("reader")
    write_examples(folder)
    with pytest.MonkeyPatch.context() as patch:
        call = typed(patch, folder)
        # Before torch is imported: its threads would wait for each other, with other tests beside.
        patch.setenv("OMP_NUM_THREADS", "1")
        for place in (folder, ROOT / "examples" / "custom_backend"):
            patch.syspath_prepend(str(place))
            patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        # The machine's ceilings are measured once for all commands, not for each.
        once = InProcess(worker.run_here)
        patch.setattr(context, "make_isolation", lambda options, run_folder: once)
        yield folder, call
    for name in ("my_module", "sliced_attention"):
        sys.modules.pop(name, None)


@pytest.fixture
def real(here, monkeypatch):
    """Return the same folder, for commands that start processes."""
    monkeypatch.setattr(Worker, "start", START)
    return here


def test_every_command_is_run_or_has_a_reason():
    run = ("backends", "compare", "duel", "explain", "log", "run")
    for words in WORDS:
        known = words[:3] == ("python", "-m", "attn_exp") or (words[0] == "attn-exp" and words[1] in run)
        assert known or reasons(words), words
    for fragment, reason in NOT_RUN.items():
        assert any(fragment in " ".join(words) for words in WORDS), f"no command has {fragment}"
        for name in re.findall(r"tests/[\w/.]+", reason):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("arguments", but_for_names(run_here("run")), ids=" ".join)
def test_every_measurement_runs(here, arguments):
    folder, call = here
    before = set((folder / "multirun").glob("*/*/record.json"))
    asks = {"--help", "--version"} & set(arguments)
    code, out, err = call(*(arguments if asks else shrunk(arguments)))
    # Progress, a line a job, and nothing else is on standard error but the note of the notebook's experiment.
    others = [line for line in err.splitlines() if not PROGRESS.match(line)]
    assert (code, others) == (0, NOTES.get(" ".join(arguments), "").splitlines())
    if asks or "dry_run=true" in arguments:
        assert out
        return
    made = set((folder / "multirun").glob("*/*/record.json")) - before
    assert made or "were done before" in out + err
    for path in made:
        record = read_record(path.parent)
        assert record.status in ("ok", "unsupported", "unavailable"), record.reason
        # A sweep over every backend has those of a GPU, too.
        every = any(argument.startswith(("backend=glob", "backend=all")) for argument in arguments)
        assert every or record.status == "ok" or record.request.backend["name"] not in EVERYWHERE, record.reason
        assert {name: profile.status for name, profile in record.profiles.items()} in ({}, {"torch": "ok"})


@pytest.mark.parametrize("arguments", NOT_HERE, ids=" ".join)
def test_every_measurement_that_cannot_run_here_composes(arguments, tmp_path, monkeypatch):
    write_examples(tmp_path)
    call = typed(monkeypatch, tmp_path)
    monkeypatch.setattr(nvml, "list_gpus", lambda: [GPU])
    # As on a host from which one submits to Slurm.
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    code, out, err = call(*arguments, "dry_run=true")
    assert (code, err) == (0, NOTES.get(" ".join(arguments), ""))
    assert "would run" in out
    assert not re.search("^impossible", out, re.MULTILINE)


@pytest.fixture(scope="module")
def overviews(here):
    """Return the exit code and the output of each of the pages' overviews, which ask the backends in one process."""
    folder, _ = here
    asked = run_here("backends")
    done = subprocess.run(
        [sys.executable, "-c", OVERVIEWS], cwd=folder, input=json.dumps(asked), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("arguments", run_here("backends"), ids=" ".join)
def test_every_overview_prints(overviews, arguments):
    code, out = overviews[arguments]
    assert code == 0 and "flash" in out


# The help, a duel of several cases, and one of a backend from a folder. tests/test_docs.py composes them all, and
# tests/test_duel.py has those of one case.
DUELS = {tuple(flags): words for words in run_here("duel") if (flags := [word for word in words if word[0] == "-"])}


@pytest.mark.parametrize("arguments", [*DUELS.values(), ()], ids=" ".join)
def test_a_duel_of_each_kind_runs(real, capsys, arguments):
    assert duel_main(shrunk(arguments) if arguments else ["--help"]) == 0
    assert "samples, verdicts and the plot are in" in capsys.readouterr().out or not arguments


@pytest.mark.parametrize("arguments", run_here("log"), ids=" ".join)
def test_every_replay_stores(here, capsys, arguments):
    folder, call = here
    for name in arguments:
        if not (folder / "multirun" / name).exists():
            assert call(*shrunk(["-m", "backend=flash,math", "batch=1,2", f"sweep={name}"]))[0] == 0
    assert log_main(list(arguments) or ["--help"]) == 0
    assert "there already" in capsys.readouterr().out or not arguments


def test_a_comparison_and_an_explanation_of_what_was_measured_here(here, capsys):
    # The pages' own, with their filters and patterns, run in tests/test_docs.py over sweeps that have what they name.
    assert here[1](*shrunk(["-m", "backend=flash,math", "batch=1,2", "sweep=measured"]))[0] == 0
    assert compare_main(["measured", "baseline=math", "out=measured.html"]) == 0
    assert explain_main(["measured"]) == 0
    assert "flash" in capsys.readouterr().out
