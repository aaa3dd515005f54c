"""What was measured on several days, machines, or in several ways: what joins, what counts, and what must not mix."""

from dataclasses import replace

import pytest
import sweeps

from attn_exp import compare
from attn_exp.core.errors import UserError


def stored(folder, **records):
    for name, several in records.items():
        sweeps.write(folder / "multirun" / name, several)
    return {"folder": str(folder / "multirun")}


def verdicts(found):
    return {(row.cell.result.label, row.cell.direction): row.verdict for row in found.rows}


def failed(backend="flash", **changes):
    return sweeps.job(backend, status="error", reason="no luck", metrics={}, environment={}, **changes)


def test_a_failed_try_gives_way_to_a_later_one_and_counts_if_it_is_the_last(tmp_path):
    old = [sweeps.job(fwd_us=100.0, finished_at=sweeps.NOON)]
    at = stored(tmp_path, old=old, fails=[failed(finished_at=sweeps.NOON + 10)],
                works=[sweeps.job(fwd_us=100.0, finished_at=sweeps.NOON + 20)],
                fails_again=[failed(finished_at=sweeps.NOON + 30)])  # fmt: skip
    assert set(verdicts(compare(["fails", "works"], "old", **at)).values()) <= {"equivalent", "undecided"}
    assert len(compare(["fails", "works"], **at).rows) == 2
    assert set(verdicts(compare(["works", "fails_again"], "old", **at)).values()) == {"lost"}


def test_cold_and_written_caches_stand_apart_everywhere(tmp_path):
    written = {"l2": "written"}
    days = {}
    for day, name in enumerate(("one", "two", "three")):
        at = sweeps.NOON + 86400 * day
        days[name] = [
            sweeps.job("flash", 100.0, None, finished_at=at),
            sweeps.job("cudnn", 90.0, None, finished_at=at),
            sweeps.job("flash", 150.0, None, measuring=written, finished_at=at),
            sweeps.job("cudnn", 149.9, None, measuring=written, finished_at=at),
        ]
    at = stored(tmp_path, **days)
    history = compare(list(days), history=True, **at)
    assert sorted(row.cell.value for row in history.rows) == [90.0, 100.0, 149.9, 150.0]
    rivals = compare("one", **at)
    assert len({row.group for row in rivals.rows}) == 2
    assert [duel.command.split()[-1] for duel in rivals.ties] == ["l2=written"]


def test_each_machine_has_its_own_winner(tmp_path):
    h100 = sweeps.H200 | {"gpu": "NVIDIA H100", "gpu_uuid": "GPU-2"}
    at = stored(tmp_path,
                here=[sweeps.job("flash", 100.0, None), sweeps.job("cudnn", 200.0, None)],
                there=[sweeps.job("flash", 400.0, None, environment=h100),
                       sweeps.job("cudnn", 200.0, None, environment=h100)])  # fmt: skip
    won = compare(["here", "there"], **at).answer.won
    found = {one.rows[0].cell.result.device_name: one.labels for one in won}
    assert found == {"NVIDIA H200": ("flash",), "NVIDIA H100": ("cudnn",)}


def test_cells_join_on_their_own_machine_and_a_gap_hides_no_other(tmp_path):
    h100 = sweeps.H200 | {"gpu": "NVIDIA H100", "gpu_uuid": "GPU-2"}
    both = [sweeps.job(fwd_us=100.0), sweeps.job(fwd_us=200.0, environment=h100)]
    other = [sweeps.job(fwd_us=200.0, environment=h100), sweeps.job(fwd_us=100.0)]
    for name, records in (("old-a", both[:1]), ("old-b", both[1:]), ("new-b", other[:1]), ("new-a", other[1:])):
        at = stored(tmp_path, **{name: records})
    found = compare(["new-b", "new-a"], ["old-a", "old-b"], **at)
    assert {row.change for row in found.rows} == {0.0}
    elsewhere = sweeps.job("cudnn", 100.0)
    days = {"s1": [sweeps.job(fwd_us=100.0), elsewhere], "s2": [elsewhere],
            "s3": [sweeps.job(fwd_us=150.0, environment=h100), elsewhere]}  # fmt: skip
    for day, (name, records) in enumerate(days.items()):
        dated = [replace(record, finished_at=sweeps.NOON + 86400 * day) for record in records]
        at = stored(tmp_path, **{name: dated})
    with pytest.raises(UserError, match="gpu NVIDIA H200 -> NVIDIA H100"):
        compare(list(days), history=True, **at)


def test_lost_is_what_is_no_longer_ok_and_a_filter_by_measured_values_hides_none(tmp_path):
    without = sweeps.job()
    for direction in ("forward", "backward"):
        del without.metrics[f"{direction}/kernel_time_us"]
    at = stored(tmp_path, old=[sweeps.job()], new=[without], broken=[failed()])
    assert set(verdicts(compare("new", "old", metric="kernel_time_us", **at)).values()) == {"undecided"}
    assert set(verdicts(compare("broken", "old", where="tflops > 1", **at)).values()) == {"lost"}
