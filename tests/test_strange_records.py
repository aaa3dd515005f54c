"""Records that are somebody else's, damaged, or of a changed program: each is read, or skipped with its reason."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sweeps

from attn_exp.core.errors import RecordError
from attn_exp.core.record.file import FILE_NAME, decode_record
from attn_exp.core.record.record import Disagreement, PassRecord
from attn_exp.results.result import decode

Tree = dict[str, Any]
Change = Callable[[Tree], object]
PATH = Path("multirun/s/job") / FILE_NAME


def put(*place: str | int, value: Any) -> Change:
    """Return a change that puts a value into a record's tree."""

    def change(tree: Tree) -> None:
        owner: Any = tree
        for key in place[:-1]:
            owner = owner[key]
        owner[place[-1]] = value

    return change


def metric(name: str, value: Any) -> Change:
    return put("metrics", name, value=value)


def environment(name: str, value: Any) -> Change:
    return put("environment", name, value=value)


# Change, and what the reason says.
STRANGE: dict[str, tuple[Change, str]] = {
    "time below zero": (metric("backward/time_us", -1.0), "metrics.backward/time_us=-1 is no possible value"),
    "no time": (lambda tree: tree["metrics"].pop("backward/time_us"), "it is ok without a time of backward"),
    "median above its interval": (metric("forward/time_high_us", 99.0), "forward/time_us=100 is outside of its own"),
    "endless lists": (put("environment", "host", value=json.loads("[" * 900 + "]" * 900)), "is not a record"),
}  # fmt: skip


def tree_of() -> Tree:
    record = sweeps.job("flash", 100.0)
    other = Disagreement(one="device", other="kernel", one_us=1.0, other_us=2.0, low=0.1, high=0.2)
    measured: PassRecord = replace(record.passes["forward"], disagreements=(other,))
    tree: Tree = msgspec.to_builtins(replace(record, passes=record.passes | {"forward": measured}))
    return tree


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_record_has_one_reason_for_both_of_its_readers(kind: str) -> None:
    change, reason = STRANGE[kind]
    tree = copy.deepcopy(tree_of())
    for reader in (decode, decode_record):
        assert reader(json.dumps(tree).encode(), PATH) is not None
    change(tree)
    for reader in (decode, decode_record):
        with pytest.raises(RecordError) as raised:
            reader(json.dumps(tree).encode(), PATH)
        said = str(raised.value)
        assert said.startswith(f"{PATH} is not a record: ")
        assert reason in said
        assert "\n" not in said and len(said) < 500
