"""The GitHub Action: its file is sound, and its shell steps do what they say, run here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cli
import pytest
import sweeps
import yaml

from attn_exp.core.errors import UserError, check_name

ROOT = Path(__file__).resolve().parent.parent
ACTION = ROOT / "action"
WORKFLOW = re.search(r"```yaml\n(name: .*?)```", (ROOT / "docs/guarding.md").read_text(), re.DOTALL)[1]


def spec():
    return yaml.safe_load((ACTION / "action.yml").read_text())


def test_the_file_names_what_there_is():
    action, text = spec(), (ACTION / "action.yml").read_text()
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(action["inputs"])
    outputs = set(re.findall(r'echo "(\w+)=', (ACTION / "measure.sh").read_text()))
    assert set(re.findall(r"steps\.measure\.outputs\.(\w+)", text)) == outputs
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        if "run" in step:
            # A value that is put into a script is run as one.
            assert step["shell"] == "bash" and "${{" not in step["run"]
            for script in re.findall(r"\w+\.sh", step["run"]):
                assert os.access(ACTION / script, os.X_OK)
                needed = set(re.findall(r"\$\{?([A-Z_]+)", (ACTION / script).read_text()))
                given = {name for name in needed if name.startswith(("GITHUB_", "MARKER"))} | set(step["env"])
                assert needed <= given, script


def test_no_baseline_gets_the_cache_of_one_whose_name_begins_alike():
    steps = {step["name"]: step.get("with", {}) for step in spec()["runs"]["steps"]}
    asked, kept = steps["Get the baseline"], steps["Keep the baseline"]
    assert asked["key"] == asked["restore-keys"] and kept["key"].startswith(asked["key"])
    with pytest.raises(UserError):
        check_name("save", f"main{asked['key'][-1]}")


def test_the_workflow_of_the_page_gives_inputs_that_exist():
    workflow = yaml.safe_load(WORKFLOW)
    (job,) = workflow["jobs"].values()
    (step,) = (one for one in job["steps"] if one.get("uses", "").endswith("/action@main"))
    inputs = spec()["inputs"]
    assert set(step["with"]) <= set(inputs)
    assert {name for name, one in inputs.items() if one.get("required")} <= set(step["with"])
    assert workflow["permissions"]["pull-requests"] == "write"


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_has_no_complaint(tmp_path):
    place = tmp_path / ".github/workflows"
    place.mkdir(parents=True)
    shutil.copytree(ACTION, tmp_path / "action")
    # The page's runner has a label of its own, which actionlint has to know.
    (tmp_path / ".github/actionlint.yaml").write_text("self-hosted-runner:\n  labels: [gpu]\n")
    (place / "guard.yml").write_text(re.sub(r"uses: \S+/action@main", "uses: ./action", WORKFLOW))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    ran = subprocess.run(["actionlint"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def measure(folder, python=sys.executable, **inputs):
    """Run the step that measures as GitHub does; return its exit code, its outputs, and the job's summary."""
    for name in ("output", "summary"):
        (folder / name).write_text("")
    environment = cli.environment() | {
        "PYTHON": str(python), "OVERRIDES": "", "BASELINE": "main", "MARGIN": "3%",
        "UNDECIDED": "warn", "SAVE": "false",
        "GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary"), **inputs,
    }  # fmt: skip
    ran = subprocess.run(
        [ACTION / "measure.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    outputs = dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())
    return ran, outputs, (folder / "summary").read_text()


def test_the_first_run_measures_and_makes_the_baseline(tmp_path):
    overrides = " ".join(word for word in cli.QUICK if not word.startswith("batch")) + "\nbackend=math,eager\nbatch=1 "
    ran, outputs, summary = measure(tmp_path, OVERRIDES=overrides)
    assert ran.returncode == 0, ran.stderr
    assert outputs == {"report": "attn-exp-main.md", "code": "", "saved": "true"}
    assert len(list((tmp_path / "baselines/main").glob("*/record.json"))) == 2
    assert "| eager |" in re.sub(" +", " ", summary) and summary == (tmp_path / "attn-exp-main.md").read_text()


STANDIN = f'''#!{sys.executable}
"""The interpreter, whose `attn_exp run` measures in no time what SPEED says."""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests")!r})
if sys.argv[3] != "run":
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
import sweeps
(sweep,) = (word.partition("=")[2] for word in sys.argv if word.startswith("sweep="))
records = [sweeps.job("flash", 100 * float(os.environ["SPEED"])), sweeps.job("math", 300.0)]
sweeps.write(Path("multirun") / sweep, records)
'''


def records_of(folder):
    return sorted(path.read_bytes() for path in folder.glob("*/record.json"))


@pytest.mark.parametrize(
    ("speed", "save", "code", "saved"), [(1.001, "true", "0", "true"), (1.2, "true", "1", "false")]
)
def test_a_later_run_is_compared_and_a_regression_never_becomes_the_baseline(tmp_path, speed, save, code, saved):
    python = tmp_path / "python"
    python.write_text(STANDIN)
    python.chmod(0o755)
    sweeps.write(tmp_path / "baselines/main", [sweeps.job("flash", 100.0), sweeps.job("math", 300.0)])
    before = records_of(tmp_path / "baselines/main")
    ran, outputs, summary = measure(tmp_path, python, SPEED=str(speed), SAVE=save)
    assert ran.returncode == 0, ran.stderr
    assert outputs == {"report": "attn-exp-main.md", "code": code, "saved": saved}
    assert ("slower" in summary.split("margin")[0]) == (code == "1")
    assert (records_of(tmp_path / "baselines/main") != before) == (saved == "true")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"OVERRIDES": "backend=flsh"}, "backend=flsh does not exist: did you mean 'flash'?"),
        ({"SAVE": "yes"}, "save is neither true nor false: yes"),
    ],
)
def test_a_mistake_in_the_inputs_fails_in_one_sentence(tmp_path, inputs, said):
    ran, outputs, summary = measure(tmp_path, **inputs)
    assert ran.returncode == 2 and said in ran.stderr
    assert (outputs, summary) == ({}, "")


GH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>calls
[[ $REFUSED == true ]] && exit 1
[[ $* == *--jq* ]] && cat ids || cat "${6#*@}" >posted
"""


def comment(folder, ids="", refused="false"):
    (folder / "ids").write_text(ids)
    (folder / "report.md").write_text("| a | b |\n" + "x" * 70_000)
    (folder / "gh").write_text(GH)
    (folder / "gh").chmod(0o755)
    environment = cli.environment() | {
        "PATH": f"{folder}:{os.environ['PATH']}", "REPORT": "report.md", "BASELINE": "main", "PULL_REQUEST": "7",
        "GITHUB_REPOSITORY": "me/mine", "REFUSED": refused,
    }  # fmt: skip
    return subprocess.run(
        [ACTION / "comment.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ("", "api --method POST repos/me/mine/issues/7/comments --field body=@"),
        ("41\n42\n", "api --method PATCH repos/me/mine/issues/comments/41 --field body=@"),
    ],
)
def test_there_is_one_comment_which_is_updated(tmp_path, ids, said):
    ran = comment(tmp_path, ids)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    look, post = (tmp_path / "calls").read_text().splitlines()
    assert look.startswith("api --paginate repos/me/mine/issues/7/comments --jq") and post.startswith(said)
    posted = (tmp_path / "posted").read_text()
    assert posted.startswith("<!-- attn-exp guard: main -->\n| a | b |\n") and len(posted) < 65_536


def test_a_token_that_may_not_comment_leaves_a_warning(tmp_path):
    ran = comment(tmp_path, refused="true")
    assert ran.returncode == 0 and ran.stdout.startswith("::warning::the comparison could not be posted")
