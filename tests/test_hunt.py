"""attn-exp hunt finds planted bugs, and makes them small."""

import re

import cli
import pytest
from inprocess import typed

# A search ends at its first find, and a busy machine takes long.
BUDGET_S = 240
# Offsets above 2^31 come late in a search of all cases.
WHERE = {"int32_strides": ("where=large and not backward and head_dim <= 64",)}


@pytest.fixture
def hunt(tmp_path, monkeypatch):
    """`attn-exp hunt ...` from this process: its search is another one."""
    call = typed(monkeypatch, tmp_path)
    monkeypatch.setenv("PYTHONPATH", cli.environment()["PYTHONPATH"])
    return lambda *words: call("hunt", *words, "device=cpu", "seed=1")


def planted(kernel, *words):
    return "backend._target_=planted.Planted", f"backend.kernel={kernel}", f"budget={BUDGET_S}s", *words


def facts(out):
    """The sentence, the smallest case's label, and the overrides."""
    sentence, found, _, command = out.splitlines()[:4]
    match = re.fullmatch(r"found after [\d.]+ s; the smallest case that shows it: (.*)", found)
    return sentence, match[1], command


# The bug, what the sentence says, and the smallest case.
PLANTED = {
    "nan_without_a_key": ("planted: out has values that are not finite", r"b1 h1 q2 kv1 d1 fp32 causal bottom_right"),
    "segfaults_at_wide_heads": ("planted: crashes: the process was killed by SIGSEGV", r"b1 h1 s1 d33 fp32 causal"),
    "int32_strides": (r"planted: .*out is off by", r"b1 .* float32 full offsets of k above 2\^31"),
}


@pytest.mark.parametrize("kernel", PLANTED)
def test_a_planted_bug_is_found_and_shrunk_and_shown(kernel, hunt):
    code, out, err = hunt(*planted(kernel, *WHERE.get(kernel, ())))
    assert code == 1, err
    sentence, label, command = facts(out)
    says, smallest = PLANTED[kernel]
    assert re.match(says, sentence)
    # Whether shrinking ends depends on what else the machine does.
    assert re.fullmatch(smallest, label) or re.match(r"b\d+ h\d+", label)
    assert command.startswith("attn-exp run ++backend._target_=planted.Planted ")


def test_a_right_backend_is_not_found_wrong(tmp_path):
    words = ("backend=eager", "budget=2s", "where=q_len <= 40 and kv_len <= 40 and large=false", "device=cpu", "seed=1")
    done = cli.run("hunt", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"eager: nothing found\. \d+ examples in \d+ s", done.stdout)
    assert "seed=1" in done.stderr


def test_an_expression_restricts_the_cases_that_are_tried(hunt):
    where = "where=causal and softcap >= 3 and head_dim=24 and dtype=bf16 and q_len in (67, 90)"
    code, out, err = hunt(*planted("off_by_one_at_a_tile", where))
    assert code == 1, err
    sentence, label, command = facts(out)
    assert re.match(r"planted: .*out .*(off by|visible)", sentence)
    assert "d24" in label and "bf16" in label and "causal" in label and "cap" in label
    assert "dtype=bf16" in command and re.search(r"(q_len|seq_len)=(67|90)\b", command)


MISTAKES = {
    "": "no backend was given: write backend=flash, or backend._target_=my.module.Class",
    "backend=flsh": "did you mean 'flash'?",
    "backend=flash batch=8": "a condition on the case is written as where=",
    "backend=flash budget=soon": "budget=soon is no time from 1 s to 24 h: use budget=60s, budget=5m",
    "backend=flash where=head_dmi=64": "names an unknown field 'head_dmi': did you mean 'head_dim'?",
    "backend=fa2 budget=5s": "fa2: it runs only on NVIDIA GPUs",
    "backend._target_=planted.Nothing budget=5s": "cannot import backend._target_=planted.Nothing",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(line, hunt):
    code, _, err = hunt(*line.split())
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("attn-exp hunt: ") and MISTAKES[line] in last


def test_without_hypothesis_it_says_what_to_type(hunt, monkeypatch):
    monkeypatch.setattr("attn_exp.commands.hunt.find_spec", lambda name: None)
    code, _, err = hunt("backend=flash")
    assert (code, err) == (2, "attn-exp hunt: a hunt needs Hypothesis: pip install 'attn_exp[hunt]'\n")
