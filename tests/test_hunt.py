"""attn-exp hunt finds planted bugs, and makes them small."""

import os
import re
import subprocess
import sys

import cli
import pytest

# A search ends at its first find, and a busy machine takes long.
BUDGET_S = 240
# Offsets above 2^31 come late in a search of all cases.
WHERE = {"int32_strides": ("where=large and not backward and head_dim <= 64",)}


def hunt(*arguments, cwd):
    return cli.run("hunt", *arguments, "device=cpu", "seed=1", cwd=cwd)


def planted(kernel, *arguments, cwd):
    backend = ("backend._target_=planted.Planted", f"backend.kernel={kernel}")
    return hunt(*backend, f"budget={BUDGET_S}s", *arguments, cwd=cwd)


def facts(out):
    """The sentence, the smallest case's label, and the overrides."""
    sentence, found, _, command = out.splitlines()[:4]
    match = re.fullmatch(r"found after [\d.]+ s; the smallest case that shows it: (.*)", found)
    return sentence, match[1], command


# The bug, what the sentence says, and the smallest case.
PLANTED = {
    "off_by_one_at_a_tile": (
        r"planted: .*out .*(off by|visible)",
        r"b1 h1 (s|q\d+ kv)(6[5-9]|[7-9]\d) d\d+ float32 causal.*",
    ),
    "no_softcap": (r"planted: .*out is off by \S+ of its norm, allowed is \S+", r"b1 h1 .*d\d float32 .*cap\d+"),
    "nan_without_a_key": ("planted: out has values that are not finite", r"b1 h1 q2 kv1 d1 fp32 causal bottom_right"),
    "segfaults_at_wide_heads": ("planted: crashes: the process was killed by SIGSEGV", r"b1 h1 s1 d33 fp32 causal"),
    "int32_strides": (r"planted: .*out is off by", r"b1 .* float32 full offsets of k above 2\^31"),
}


@pytest.mark.parametrize("kernel", PLANTED)
def test_a_planted_bug_is_found_and_shrunk_and_shown(kernel, tmp_path):
    done = planted(kernel, *WHERE.get(kernel, ()), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    sentence, label, command = facts(done.stdout)
    says, smallest = PLANTED[kernel]
    assert re.match(says, sentence)
    # Whether shrinking ends depends on what else the machine does.
    assert re.fullmatch(smallest, label) or re.match(r"b\d+ h\d+", label)
    assert command.startswith("attn-exp run ++backend._target_=planted.Planted ")


@pytest.mark.parametrize("of", ["q_len <= 40 and kv_len <= 40 and large=false", "page_size > 0"])
def test_a_right_backend_is_not_found_wrong_and_the_same_seed_searches_the_same(tmp_path, of):
    done = hunt("backend=eager", "budget=8s", f"where={of}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"eager: nothing found\. \d+ examples in \d+ s", done.stdout)
    assert "seed=1" in done.stderr


def test_an_expression_restricts_the_cases_that_are_tried(tmp_path):
    done = planted("no_softcap", "where=softcap >= 3 and head_dim=24 and dtype=bf16 and q_len in (7, 9)", cwd=tmp_path)
    assert done.returncode == 1
    _, label, command = facts(done.stdout)
    assert "d24" in label and "bf16" in label
    assert "dtype=bf16" in command and re.search(r"(q_len|seq_len)=[79]\b", command)


MISTAKES = {
    "": "no backend was given: write backend=flash, or backend._target_=my.module.Class",
    "backend=flsh": "did you mean 'flash'?",
    "backend=flash batch=8": "a condition on the case is written as where=",
    "backend=flash budget=soon": "budget=soon is no time from 1 s to 24 h: use budget=60s, budget=5m",
    "backend=flash where=head_dmi=64": "names an unknown field 'head_dmi': did you mean 'head_dim'?",
    "backend=flash where=head_dim<1": "leaves no value of head_dim: relax it",
    "backend=fa2 budget=5s": "fa2: it runs only on NVIDIA GPUs",
    "backend._target_=planted.Nothing budget=5s": "cannot import backend._target_=planted.Nothing",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(line, tmp_path):
    done = cli.run("hunt", *line.split(), "device=cpu", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("attn-exp hunt: ") and MISTAKES[line] in last


def test_without_hypothesis_it_says_what_to_type(tmp_path):
    block = (
        "import sys; sys.modules['hypothesis'] = None; sys.argv = ['attn-exp', 'hunt', 'backend=flash']; "
        "from attn_exp.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **cli.environment()},
    )
    assert done.returncode == 2
    assert done.stderr == "attn-exp hunt: a hunt needs Hypothesis: pip install 'attn_exp[hunt]'\n"
