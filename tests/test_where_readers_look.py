"""What a careful reader needs of a record is in tables, CSV, MLflow, comparisons, job pages and reports."""

import csv
import io
from dataclasses import replace

import pytest
import rich_records
import sweeps

from attn_exp import compare
from attn_exp.comparison.pages import page
from attn_exp.core.sheet.render import text_of
from attn_exp.explain.page import job_page
from attn_exp.results.result import result_of
from attn_exp.results.table import csv_text, table
from attn_exp.tracking.base import metrics, tags

COLUMNS = ("joules_per_call", "tflops_per_watt", "peak_memory_bytes")
# What the record of `rich_records` has, as the row of `table.csv` has it.
IN_CSV = {
    "forward/joules_per_call": "0.1", "forward/tflops_per_watt": "1", "forward/clock_mhz": "1980",
    "forward/memory_clock_mhz": "3000", "forward/power_w": "600",
    "forward/round_autocorrelation": "0.5", "forward/effective_rounds": "5", "forward/peak_memory_bytes": "4096",
    "forward/workspace_bytes": "10", "forward/outside_memory_bytes": "5", "ecc": "False", "matmul_tf32": "False",
    "cudnn_tf32": "True", "bf16_reduced_precision_reduction": "True", "fp16_reduced_precision_reduction": "False",
    "matmul_precision": "highest", "cpu_governor": "powersave", "cpu_affinity": "0-1", "numa_nodes": "0-1",
    "gpu_numa_node": "0", "cpu_capability": "AVX512", "cpu_instruction_sets": "avx2 avx512f", "cpu_threads": "2",
}  # fmt: skip
IN_EXPLAIN = (
    "600.0 W (+-1.0 %) counter, 0.1000 J a call, 1.000 TFLOPS/W",
    "0.0 MiB memory of the call, 0.0 MiB of it workspace, 0.0 MiB outside",
    "kernel has 2.000 us and device 1.000 us, 100.0 % more",
)


@pytest.fixture(scope="module")
def records():
    jobs = [sweeps.job("flash", 100.0, 250.0), sweeps.job("cudnn", 90.0, 250.0)]
    return [rich_records.rich(job) for job in jobs]


def words(text):
    return " ".join(text.split())


def test_the_csv_has_what_moves_a_time_beside_it(records):
    (row, _) = csv.DictReader(io.StringIO(csv_text([result_of(record) for record in records])))
    assert {name: row[name] for name in IN_CSV} == IN_CSV
    assert "kernel has 2.000 us and device 1.000 us" in row["second_opinions"]


def test_a_job_s_page_has_power_memory_and_timers_that_disagree(records, tmp_path):
    result, *others = sweeps.sweep(tmp_path / "s", records).results
    shown = words(job_page(result, others))
    assert [one for one in IN_EXPLAIN if one not in shown] == []


def test_a_table_has_the_columns_that_are_asked_for(records):
    shown = table([result_of(record) for record in records], width=200, columns=COLUMNS)
    assert "omitted" not in shown
    (row, *_) = (words(line) for line in shown.splitlines() if line.startswith("flash"))
    assert "0.1000 0.1000 1.000 1.000 4096 4096" in row


def test_mlflow_has_each_number(records):
    stored = metrics(records[0])
    assert {name for name in IN_CSV if "/" in name} <= stored.keys()
    assert "kernel has 2.000 us and device 1.000 us" in tags(records[0])["attn_exp.timers_disagree_forward"]


@pytest.mark.parametrize("metric", ["joules", "memory", "tflops_per_watt", "tflops"])
def test_only_what_a_duel_decides_is_left_to_one(records, tmp_path, metric):
    equal = [replace(one, metrics=records[0].metrics) for one in records]
    found = compare(sweeps.sweep(tmp_path / "s", equal), metric={"memory": "peak_memory_bytes"}.get(metric, metric))
    assert found.answer.ties == 2
    assert bool(found.ties) is ("attn-exp duel" in text_of(page(found))) is (metric == "tflops")
    assert any("longer passes narrow" in note for note in found.notes) is (metric in ("joules", "tflops_per_watt"))
