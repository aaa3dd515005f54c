"""Tests that the documentation is true: its links, commands, examples, figures and lists."""

import ast
import importlib.util
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import inprocess
import pytest
import sweeps
import yaml

import attn_exp
from attn_exp.cli import COMMANDS, dispatch
from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.duel import COMMAND as DUEL
from attn_exp.commands.duel import rivals_of
from attn_exp.commands.explain import main as explain_main
from attn_exp.commands.log import main as log_main
from attn_exp.comparison.changes import VERDICTS
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError
from attn_exp.core.host import nvml
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.flags import FLAGS
from attn_exp.core.record.metrics import METRICS
from attn_exp.core.record.window import Window
from attn_exp.core.sheet import FORMATS
from attn_exp.results.table import csv_text
from attn_exp.sweep.product import parsed_combinations

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
# Their commands were run once, some by older versions.
RECORDED = ("bench/README.md", *(f"results/{place}/README.md" for place in ("cpu", "h100", "h200")))
GPU = GpuInfo(index=0, uuid="GPU-0", name="NVIDIA H200")
# Words that the reader replaces.
_PLACEHOLDER = re.compile(r"\b(NAME|FOLDER|URI|FILE|N|COMMAND|OUT|OUT_FOLDER)\b|=\.\.\.|=$|http:")


def fenced(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands():
    """Return the commands of all pages, fenced or inline, as lists of words."""
    lines = set()
    for text in TEXTS.values():
        lines |= {line for block in fenced(text, "bash") for line in block.splitlines() if line.strip()}
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        lines |= set(re.findall(r"`(python [^`]+|attn-exp [^` ]+ [^`]+)`", re.sub(r"\s*\n\s*", " ", prose)))
    return [shlex.split(line, comments=True) for line in sorted(lines) if not _PLACEHOLDER.search(line)]


def of_command(name):
    """Return the arguments of all commands `attn-exp NAME ...`; without a name, and in a container, `run`'s."""
    arguments = [words[2:] for words in commands() if words[:2] == ["attn-exp", name]]
    if name == "run":
        arguments += [words[3:] for words in commands() if words[:3] == ["python", "-m", "attn_exp"]]
        runs = [words for words in commands() if words[:2] == ["docker", "run"] and "--entrypoint" not in words]
        arguments += [words[words.index("attn_exp") + 1 :] for words in runs]
    return arguments


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def write_examples(folder):
    """Write the pages' module, YAML and experiments where a reader would put them."""
    (folder / "my_module.py").write_text(fenced(TEXTS["docs/adding_a_backend.md"], "python")[0])
    for name in ("backend/mine", "experiment/short", "experiment/long"):
        (folder / "my_conf" / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "my_conf/backend/mine.yaml").write_text(fenced(TEXTS["docs/adding_a_backend.md"], "yaml")[0])
    for name in ("short", "long"):
        (folder / f"my_conf/experiment/{name}.yaml").write_text(fenced(TEXTS["docs/running_sweeps.md"], "yaml")[0])
    (folder / "examples").symlink_to(ROOT / "examples")


@pytest.mark.parametrize("page", [*TEXTS, *RECORDED])
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
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


@pytest.fixture(scope="module")
def embed():
    spec = importlib.util.spec_from_file_location("embed", ROOT / "docs" / "embed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_regime_and_clock_of_rows_are_those_of_their_blocks_else_of_their_window(embed):
    record = sweeps.job("flash", 100.0, None, measuring={"regime": "burst"})
    assert embed.measured_at([record]) == "regime burst"
    own = replace(record.passes["forward"], window=Window(clock_mhz=1965.0))
    windowed = replace(record, passes={"forward": own})
    assert embed.measured_at([windowed]) == "regime burst, SM clock 1,965 MHz"
    blocks = replace(own.timings[0], clocks_mhz=(1972.0, 1980.0))
    of_blocks = replace(record, passes={"forward": replace(own, timings=(blocks,))})
    assert embed.measured_at([of_blocks]) == "regime burst, SM clock 1,972 to 1,980 MHz"
    assert embed.measured_at([of_blocks, windowed]) == "regime burst, SM clock 1,965 to 1,980 MHz"


def test_the_figures_in_the_pages_are_those_of_the_results(embed):
    blocks = 0
    for page in embed.PAGES:
        text = TEXTS[page.relative_to(ROOT).as_posix()]
        assert embed.embedded(text) == text, f"{page.name} is not up to date: run python docs/embed.py"
        blocks += text.count("<!-- end -->")
    # README.md, one each of backends, metrics, statuses and timers.
    assert blocks == 5


def test_the_readme_answers_in_its_first_screen():
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) < 200
    first = "\n".join(lines[:40])
    assert "make demo" in first and "make test" in first and "<!-- fastest: " in first


def test_the_pages_and_the_help_say_how_long_the_doctor_takes(capsys):
    seconds = sum(map(int, re.findall(r"\[(\d+) s\]", (ROOT / "results/h200/doctor/doctor.txt").read_text())))
    assert f"on an H200 it took {seconds} s" in " ".join(TEXTS["docs/comparing.md"].split())
    assert 240 < seconds < 360 and "about five minutes on a GPU" in " ".join(TEXTS["docs/comparing.md"].split())
    assert dispatch(["doctor", "--help"]) == 0
    assert "about five minutes" in " ".join(capsys.readouterr().out.split())


def test_table_csv_lacks_what_the_page_says_and_has_the_rest():
    (text,) = re.findall(r"## table.csv\n(.*?)\n## ", TEXTS["docs/records.md"], re.DOTALL)
    assert "every [metric]" in text
    columns = csv_text([]).strip().split(",")
    assert {"status", "reason", "flags", "forward/kernels", "torch"} <= set(columns)
    assert {f"backward/{name}" for name in METRICS if "{" not in name} <= set(columns)
    for lacking in re.findall(r"has the (.*?)\.", text.replace("\n", " "))[0].replace(" and", ",").split(", "):
        assert not [name for name in columns if lacking in name and not name.endswith("/samples")], lacking


def test_the_pictures_are_small_and_all_shown():
    shown = {Path(name).name for text in TEXTS.values() for name in re.findall(r"pictures/\w+\.png", text)}
    assert shown == {path.name for path in (ROOT / "docs/pictures").iterdir()}
    assert all(path.stat().st_size < 200_000 for path in (ROOT / "docs/pictures").iterdir())


def test_the_documentation_is_short_and_its_sentences_are_plain():
    spec = importlib.util.spec_from_file_location("words", ROOT / "bench" / "words.py")
    words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(words)
    pages = [text for name, text in TEXTS.items() if name.startswith("docs/")]
    assert len(pages) <= 24 and sum(len(text.split()) for text in pages) <= 26_000
    sentences = [sentence for text in pages for sentence in words.sentences(text)]
    assert sum(bool(words.INVERTED.match(sentence)) for sentence in sentences) < 0.01 * len(sentences)
    assert sum(len(sentence.split()) > words.LONG for sentence in sentences) < 0.02 * len(sentences)


def test_the_first_page_shows_what_each_of_its_commands_prints():
    five_minutes, _, _ = TEXTS["docs/getting_started.md"].partition("## Other ways to install")
    blocks = re.findall(r"```(\w+)\n(.*?)```", five_minutes, re.DOTALL)
    for (kind, text), (following, _) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "python" or (kind == "bash" and not text.startswith("pip ")):
            assert following == "text", text


def test_there_are_commands_to_test():
    assert len(of_command("run")) > 15
    assert all(of_command(name) for name in COMMANDS if name != "worker")


def test_the_pages_use_the_command_and_not_its_modules():
    assert [
        words for words in commands() if words[:2] == ["python", "-m"] and words[2] not in ("attn_exp", "pytest")
    ] == []


# The two APIs of the notebook's experiment are an option of one of its backends.
NOTES = {"-m +experiment=cudnn_notebook": "backend.api is no option of cudnn and eager: they run without it\n"}


def but_for_names(commands):
    """Return one of those commands that differ in the name of their sweep alone."""
    return list({tuple(word for word in words if not word.startswith("sweep=")): words for words in commands}.values())


def printed():
    """Return the arguments of commands in golden files, in the overview, in each command's help and in messages.

    A part of a message that is only known when it is printed is NAME.
    """
    texts = [path.read_text() for path in (ROOT / "tests/golden").rglob("*.txt")]
    texts.append((conf_folder() / "config.yaml").read_text())
    for path in (ROOT / "attn_exp").rglob("*.py"):
        tree = ast.parse(path.read_text())
        joined = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for parts in joined for part in parts}
        joined += [[node] for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in inside]
        for parts in joined:
            known = [str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in parts]
            texts.append("".join(known))
    word = r"[+\w./]+=(?:'[^']+'|[^\s;'\"`]*[^\s;:,'\"`).])|[A-Z]{3,}[\w/]*|first[\w/-]*"
    pattern = rf"(?:attn-exp|python -m attn_exp)((?: (?:{'|'.join(COMMANDS)})\b)?(?: -m\b)?(?: (?:{word}))+)"
    found = {line for text in texts for line in re.findall(pattern, text)}
    examples = [
        one.partition("attn-exp ")[2] for name in COMMANDS for one, _ in command_of(name).examples if name != "run"
    ]
    words = {tuple(shlex.split(line)) for line in [*found, *examples]}
    # What the pages say, too, is tried as theirs.
    paged = {tuple(arguments) for arguments in of_command("run")}
    return sorted(words - paged - {("COMMAND",), ("NAME",), ("NAME", "NAME"), ("backends", "NAME")})


def command_of(name):
    return getattr(importlib.import_module(f"attn_exp.commands.{name}"), "COMMAND", replace(DUEL, examples=()))


def test_every_command_that_the_program_prints_works(tmp_path, monkeypatch):
    typed = inprocess.typed(monkeypatch, tmp_path)
    monkeypatch.setattr(nvml, "list_gpus", lambda: [GPU])
    # Not a test for each: to look for them takes a second of each process that collects the tests.
    for words in printed():
        if words[0] not in COMMANDS or words[0] == "run":
            chosen = [word for word in words if not re.fullmatch("run|[A-Z]+|dry_run=true", word)]
            code, _, err = typed(*chosen, "dry_run=true")
            assert (code, err) == (0, ""), words
            continue
        given = command_of(words[0]).parse(words[1:])
        for combination in parsed_combinations(given.overrides) if words[0] in ("duel", "backends") else ():
            rivals, shared = rivals_of(combination) if words[0] == "duel" else ({"a": []}, combination)
            assert [resolved_config(compose_config([*own, *shared], "a")) for own in rivals.values()], words


@pytest.mark.parametrize("arguments", of_command("duel"), ids=" ".join)
def test_every_duel_composes(arguments, tmp_path, monkeypatch):
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    typed = DUEL.parse(arguments)
    for words in parsed_combinations(typed.overrides) if typed.multirun else [typed.overrides]:
        rivals, shared = rivals_of(words)
        for own in rivals.values():
            config = resolved_config(compose_config([*own, *shared], "a", typed.config_dir))
            assert request_from_config(config, [GPU]).device == "cuda"


def sweeps_to_compare(folder):
    """Write the sweeps, figures and database that the pages' comparisons name."""
    names = (
        "first",
        "flux",
        "second",
        "old",
        "new",
        "started",
        "monday",
        "tuesday",
        "friday",
        *("h200", "published", "later", "table"),
        *(f"nightly-{day}" for day in range(9)),
    )
    for day, name in enumerate(names):
        records = [sweeps.job(backend, us, of=sweeps.case(seq_len=4096), finished_at=sweeps.NOON + 86400 * day)
                   for backend, us in (("flash", 100.0), ("cudnn", 80.0))]  # fmt: skip
        sweeps.write(folder / "multirun" / name, records)
    (folder / "figures.csv").write_text("library,seq_len,tflops\nFA2,4096,300\n")


@pytest.mark.parametrize("arguments", [words for words in of_command("compare") if words != ["--help"]], ids=" ".join)
def test_every_comparison_runs(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweeps_to_compare(tmp_path)
    if {"against=main", "replace=true"} & set(arguments):
        attn_exp.load("first").save("main")
    if any(word.startswith("uri=") for word in arguments):
        assert log_main(["first"]) == 0
        capsys.readouterr()
    assert compare_main(arguments) == 0
    assert capsys.readouterr().out or next(tmp_path.glob("*.[hm]*")).read_text()


@pytest.mark.parametrize("arguments", of_command("explain"), ids=" ".join)
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


@pytest.mark.parametrize("name", ["doctor", "log", "ui"])
def test_the_arguments_of_the_other_commands_are_accepted(name):
    command = importlib.import_module(f"attn_exp.commands.{name}").COMMAND
    for arguments in of_command(name):
        command.parse(arguments)
    with pytest.raises(UserError):
        command.parse(["first", "uri=a", "uri=b"])


def test_the_demo_installs_no_tools_of_developers(tmp_path):
    done = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--editable ." in done.stdout and "[dev]" not in done.stdout and "minutes" in done.stdout


def test_every_file_and_target_of_a_command_is_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands():
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "attn-exp" and not words[1].startswith("-"):
            assert words[1] in COMMANDS or "=" in words[1], words
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).exists(), words


def message_texts():
    """Return all strings of the package's modules as one text; a line break stands for what is filled in."""
    strings = []
    for path in (ROOT / "attn_exp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    return "\n".join(strings)


def is_message(quoted, texts):
    """Return whether most of the longest piece of a quoted message, without names and numbers, is in the texts."""
    piece = max(re.split(r"\.\.\.|\bN\b|SIGSEGV", quoted), key=len).strip(" ,:'")
    window = min(len(piece), max(6, round(0.6 * len(piece))))
    return any(piece[start : start + window] in texts for start in range(len(piece) - window + 1))


def test_every_message_of_the_page_is_one_of_the_program():
    rows = re.findall(r"^\| (`.+?) \|", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", re.sub(r"\(`\w+`\)", "", row))]
    assert len(messages) > 25
    texts = message_texts()
    assert [message for message in messages if not is_message(message, texts)] == []
    assert not is_message("there is no such message anywhere", texts)


def test_every_flag_is_explained():
    for flag, (mark, _) in FLAGS.items():
        assert f"| {f'`{mark}`' if mark else ''} | `{flag}`" in TEXTS["docs/metrics.md"], flag


def test_every_option_and_key_is_explained():
    # The tables of backends and timers are made from conf/, on pages of their own.
    pages = {"backend": "docs/backends.md", "timer": "docs/measuring.md"}
    for path in conf_folder().glob("*/*.yaml"):
        text = TEXTS[pages.get(path.parent.name, "docs/configuration.md")]
        assert f"`{path.stem}`" in text or f"+{path.parent.name}={path.stem}" in text, path
    text = TEXTS["docs/configuration.md"]
    config = yaml.safe_load((conf_folder() / "config.yaml").read_text())
    for key in set(config) - {"defaults", "hydra"}:
        assert re.search(rf"`{key}[`.]", text), key
