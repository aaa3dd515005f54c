"""The documentation says what is there: its links, commands, examples, figures and lists."""

import ast
import importlib.util
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import cli
import inprocess
import pytest
import sweeps
import yaml

from attn_exp.commands import ui
from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.duel import rivals_of
from attn_exp.commands.explain import main as explain_main
from attn_exp.compare.changes import VERDICTS
from attn_exp.compare.render import FORMATS
from attn_exp.config.compose import compose_config, plain, split_config_dir
from attn_exp.config.request import request_from_config
from attn_exp.core.conf import conf_folder
from attn_exp.core.flags import FLAGS
from attn_exp.core.nvml import GpuInfo
from attn_exp.results.read import read_folder

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
GPU = GpuInfo(index=0, uuid="GPU-0", name="NVIDIA H200")
# Words that stand for something of the reader's.
_PLACEHOLDER = re.compile(r"\b(NAME|FOLDER|URI|FILE|N)\b|=\.\.\.|=$|http:")


def fenced(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands():
    """All commands of all pages, fenced or inline, as lists of words."""
    found = set()
    for text in TEXTS.values():
        lines = [line for block in fenced(text, "bash") for line in block.splitlines()]
        lines += re.findall(r"`(python [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        found |= {line for line in lines if line.strip() and not _PLACEHOLDER.search(line)}
    return [shlex.split(line, comments=True) for line in sorted(found)]


def of_module(name):
    """The arguments of this module's commands; a container's are those of `attn_exp`."""
    found = [words[3:] for words in commands() if words[:3] == ["python", "-m", name]]
    if name == "attn_exp":
        runs = [words for words in commands() if words[:2] == ["docker", "run"] and "--entrypoint" not in words]
        found += [words[words.index(name) + 1 :] for words in runs]
    return found


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def write_examples(folder):
    """The README's module and YAML, and the pages' experiments, where a reader would put them."""
    (folder / "my_module.py").write_text(fenced(TEXTS["README.md"], "python")[0])
    for name in ("backend/mine", "experiment/short", "experiment/long"):
        (folder / "my_conf" / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "my_conf/backend/mine.yaml").write_text(fenced(TEXTS["README.md"], "yaml")[0])
    for name in ("short", "long"):
        (folder / f"my_conf/experiment/{name}.yaml").write_text(fenced(TEXTS["docs/configuration.md"], "yaml")[0])
    (folder / "examples").symlink_to(ROOT / "examples")


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_that_is_named_is_there(page):
    prose = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for path in re.findall(r"`(?:python )?((?:attn_exp|conf|tests|bench|docs)/[\w/.]+)`", prose):
        assert "NAME" in path or (ROOT / path).exists(), path


def test_the_readme_has_the_results_that_are_kept():
    spec = importlib.util.spec_from_file_location("embed", ROOT / "docs" / "embed.py")
    embed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embed)
    assert embed.embedded(TEXTS["README.md"]) == TEXTS["README.md"], "run python docs/embed.py"
    assert embed.with_backends(TEXTS["docs/backends.md"]) == TEXTS["docs/backends.md"], "run python docs/embed.py"


def test_the_pictures_are_small_and_all_shown():
    shown = {Path(name).name for text in TEXTS.values() for name in re.findall(r"pictures/\w+\.png", text)}
    assert shown == {path.name for path in (ROOT / "docs/pictures").iterdir()}
    assert all(path.stat().st_size < 300_000 for path in (ROOT / "docs/pictures").iterdir())


def test_there_are_commands_to_test():
    assert len(of_module("attn_exp")) > 15
    assert of_module("attn_exp.ui") and of_module("attn_exp.duel")


@pytest.mark.parametrize("arguments", of_module("attn_exp"), ids=" ".join)
def test_every_command_composes(arguments, tmp_path, monkeypatch):
    write_examples(tmp_path)
    typed = inprocess.typed(monkeypatch, tmp_path)
    monkeypatch.setattr("attn_exp.run.session.visible_gpus", lambda: [GPU])
    # As on a host from which one submits to Slurm.
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    code, out, err = typed(*arguments, *(["dry_run=true"] if "--help" not in arguments else []))
    assert (code, err) == (0, "")
    assert "--help" in arguments or "would run" in out
    assert not re.search("^impossible", out, re.MULTILINE)


@pytest.mark.parametrize("arguments", [words for words in of_module("attn_exp.duel") if words], ids=" ".join)
def test_every_duel_composes(arguments, tmp_path, monkeypatch):
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    words, folder = split_config_dir(arguments)
    rivals, shared = rivals_of(words)
    for own in rivals.values():
        assert request_from_config(plain(compose_config([*own, *shared], "a", folder)), [GPU]).device == "cuda"


def sweeps_to_compare(folder):
    """The sweeps, figures and database that the pages' comparisons speak of."""
    names = (
        "first",
        "second",
        "old",
        "new",
        "started",
        "monday",
        "tuesday",
        "friday",
        *(f"nightly-{day}" for day in range(9)),
    )
    for day, name in enumerate(names):
        records = [sweeps.job(backend, us, of=sweeps.case(seq_len=4096), finished_at=sweeps.NOON + 86400 * day)
                   for backend, us in (("flash", 100.0), ("cudnn", 80.0))]  # fmt: skip
        sweeps.write(folder / "multirun" / name, records)
    (folder / "figures.csv").write_text("library,seq_len,tflops\nFA2,4096,300\n")
    (folder / "mlruns").mkdir()
    with sqlite3.connect(folder / "mlruns" / "mlflow.db") as database:
        database.executescript(
            """CREATE TABLE experiments (experiment_id, name); INSERT INTO experiments VALUES (1, 'attn_exp');
            CREATE TABLE runs (run_uuid, experiment_id, artifact_uri, lifecycle_stage, start_time);
            CREATE TABLE tags (key, value, run_uuid);"""
        )
        for job in (folder / "multirun" / "first").iterdir():
            database.execute("INSERT INTO runs VALUES (?, 1, ?, 'active', 0)", (job.name, str(job)))
            for tag in (("attn_exp.kind", "job"), ("attn_exp.sweep", "first")):
                database.execute("INSERT INTO tags VALUES (?, ?, ?)", (*tag, job.name))


@pytest.mark.parametrize("arguments", [words for words in of_module("attn_exp.compare") if words], ids=" ".join)
def test_every_comparison_runs(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweeps_to_compare(tmp_path)
    assert compare_main(arguments) == 0
    assert capsys.readouterr().out or next(tmp_path.glob("*.[hm]*")).read_text()


@pytest.mark.parametrize("arguments", [words for words in of_module("attn_exp.explain") if words], ids=" ".join)
def test_every_explanation_runs(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweeps_to_compare(tmp_path)
    assert explain_main(arguments) == 0
    assert "flash" in capsys.readouterr().out


def test_the_page_on_comparing_names_every_verdict_format_and_example(tmp_path, monkeypatch):
    page = TEXTS["docs/comparing.md"]
    for name in (*VERDICTS, *FORMATS):
        assert f"`{name}`" in page, name
    monkeypatch.chdir(tmp_path)
    sweeps_to_compare(tmp_path)
    exec(fenced(page, "python")[0], {})


def test_the_other_commands_are_there(capsys):
    with pytest.raises(SystemExit):
        ui.main(["--help"])
    help_text = capsys.readouterr().out
    assert {word for words in of_module("attn_exp.ui") for word in words if word.startswith("--")} <= set(
        re.findall(r"--[\w-]+", help_text)
    )
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands():
        if words[0] == "make":
            assert words[1] in targets
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), words


def test_the_readme_s_backend_really_runs(tmp_path):
    # In a worker process, which has to find the module where the reader stands; tests/test_docs_run.py runs it here.
    write_examples(tmp_path)
    words = ("--config-dir", "my_conf", "backend=mine", *cli.QUICK, "tracker=none", "sweep=a")
    ran = subprocess.run(
        [sys.executable, "-m", "attn_exp", *words],
        cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (record,) = read_folder(tmp_path / "multirun" / "a").records()
    assert (record.status, record.reason, record.request.backend["name"]) == ("ok", None, "mine")


def said_texts():
    """All that the program's modules can say, as one text with a line for what is filled in between."""
    found = []
    for path in (ROOT / "attn_exp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def is_said(message, texts):
    """Whether most of the longest piece of a quoted message, names and numbers apart, is in the texts."""
    piece = max(re.split(r"\.\.\.|\bN\b|SIGSEGV", message), key=len).strip(" ,:'")
    window = min(len(piece), max(6, round(0.6 * len(piece))))
    return any(piece[start : start + window] in texts for start in range(len(piece) - window + 1))


def test_every_message_that_is_explained_is_one_that_the_program_says():
    rows = re.findall(r"^\| (`.+?) \|", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", re.sub(r"\(`\w+`\)", "", row))]
    assert len(messages) > 50
    texts = said_texts()
    # The last is PyTorch's own.
    assert [message for message in messages if not is_said(message, texts)] == ["OutOfMemoryError"]
    assert not is_said("there is no such message anywhere", texts)


def test_every_flag_is_explained():
    for flag, (mark, _) in FLAGS.items():
        assert f"| `{mark}` | `{flag}`" in TEXTS["docs/measuring.md"], flag


def test_every_metric_is_explained():
    source = (ROOT / "attn_exp" / "metrics.py").read_text()
    named = re.findall(r'^        "(\w+)": ', source, re.MULTILINE)
    assert len(named) > 20
    for name in named:
        assert f"`{name}`" in TEXTS["docs/measuring.md"], name


def test_every_option_and_key_is_explained():
    for path in conf_folder().glob("*/*.yaml"):
        text = TEXTS["docs/backends.md"] if path.parent.name == "backend" else TEXTS["docs/configuration.md"]
        assert f"`{path.stem}`" in text or f"+{path.parent.name}={path.stem}" in text, path
    text = TEXTS["docs/configuration.md"]
    config = yaml.safe_load((conf_folder() / "config.yaml").read_text())
    for key in set(config) - {"defaults", "hydra"}:
        assert re.search(rf"`{key}[`.]", text), key


def test_every_timer_is_explained():
    for path in (conf_folder() / "timer").glob("*.yaml"):
        assert path.stem == "auto" or f"| `{path.stem}`" in TEXTS["docs/measuring.md"], path
