"""The group `inputs`: its choices, its part in a job's identity, and that results of other inputs are never joined."""

import cli
import inprocess
import pytest

from attn_exp.comparison.join import comparable_groups, joined
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.record.file import read_record
from attn_exp.results.cell import ChosenMetric, cells_of
from attn_exp.results.read import read_folder
from attn_exp.workloads import workload_of

ONE = (
    "batch=1",
    "dtype=fp32",
    *(f"model.{size}" for size in ("embedding=null", "q_heads=2", "kv_heads=2")),
    "model.head_dim=32",
    "seq_len=64",
)
FAST = ("device=cpu", "tracker=none", "save_plots=false", "stopping.min_rounds=2", "stopping.max_rounds=2")


@pytest.fixture
def typed(tmp_path, monkeypatch):
    return inprocess.typed(monkeypatch, tmp_path)


def jobs(typed, *words):
    code, out, err = typed("-m", "backend=math", "device=cpu", *words, "dry_run=true")
    assert (code, err) == (0, ""), err
    return out


def case_of(dtype, **more):
    sizes = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 16, "kv_len": 16, "head_dim": 16, "value_dim": 16}
    return Case(**sizes, dtype=dtype, **more)


def test_another_kind_is_another_job_and_normal_is_the_same_one(typed):
    plain, normal, hard = (jobs(typed, *ONE, *more) for more in ((), ("inputs=normal",), ("inputs=mixed",)))
    names = [next(word for word in out.split() if word.startswith("math-")) for out in (plain, normal, hard)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("inputs=mixd", "did you mean 'mixed'"),
        ("inputs.name=mixd", "did you mean 'mixed'"),
        ("~inputs", "inputs cannot be removed"),
    ],
)
def test_an_unknown_kind_is_refused(typed, word, says):
    code, _, err = typed("backend=math", "device=cpu", word, "dry_run=true")
    assert code == 2
    assert says in err


def test_a_block_has_no_hard_inputs(typed):
    words = ("model=llama3_8b", "workload=decoder_layer", "inputs=sharp", "device=cpu", "dry_run=true")
    code, _, err = typed("backend=math", *words)
    assert code == 2
    assert "workload=decoder_layer computes itself: set inputs=normal, or workload=attention" in err
    case = case_of("float32", causal=True, workload="decoder_layer", mlp_dim=32)
    with pytest.raises(ValueError, match="no inputs of the kind sharp"):
        workload_of(case).make_inputs(case, "cpu", 1, with_gradients=False, kind="sharp")


def test_records_say_what_they_were_measured_on_and_are_never_joined(tmp_path):
    ran = cli.run("-m", "backend=math,flash", "inputs=normal,mixed", *ONE, *FAST, "sweep=x", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "inputs mixed" in ran.stderr
    folder = tmp_path / "multirun" / "x"
    records = [read_record(path.parent) for path in folder.glob("*/record.json")]
    assert {record.request.measuring.inputs: record.environment["inputs"] for record in records} == {
        NORMAL: "normal(0, 1)",
        "mixed": "hard values: mixed",
    }
    assert all(record.status == "ok" for record in records)
    cells = list(cells_of(read_folder(folder).results, ChosenMetric()))
    for group in comparable_groups(cells):
        assert len({cell.result.measuring.inputs for cell in group}) == 1
    by_kind = {kind: [cell for cell in cells if cell.result.measuring.inputs == kind] for kind in (NORMAL, "mixed")}
    assert len(by_kind["mixed"]) == 4
    answer = cli.run("compare", "multirun/x", "where=inputs==mixed", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    asked = cli.run("compare", "multirun/x", cwd=tmp_path)
    assert "inputs" in asked.stdout
    assert joined(by_kind[NORMAL], by_kind[NORMAL])
