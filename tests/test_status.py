"""Statuses have one home, core/status.py; docs and the files that set them agree with it."""

import re
from pathlib import Path
from typing import get_args

import pytest

import attn_exp
from attn_exp.core.status import STATUSES, Status, status_table

PACKAGE = Path(attn_exp.__file__).parent
ROOT = PACKAGE.parent
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| (yes|no) \|", re.MULTILINE)
# How a status is set: given to Stopped, Outcome or Record, or assigned.
SETS = r'(?:Stopped\(|Outcome\(folder, |status=|status = |status: Status = |self.reason = ).*"%s"|or "%s"'


def test_the_table_has_every_status():
    assert tuple(STATUSES) == get_args(Status)


@pytest.mark.parametrize("status", STATUSES)
def test_the_files_that_set_a_status_are_those_of_the_table(status):
    sets = re.compile(SETS % (status, status))
    setting = set()
    for room in ("worker", "run"):
        for path in (PACKAGE / room).glob("*.py"):
            lines = [line for line in path.read_text().splitlines() if "Profile(" not in line]
            setting |= {f"{room}/{path.name}" for line in lines if sets.search(line)}
    assert setting == set(STATUSES[status].set_by)


def test_the_docs_have_the_table():
    assert status_table() in (ROOT / "docs" / "records.md").read_text(), "run python docs/embed.py"


def test_a_shorter_table_agrees():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for status, meaning, again in ROW.findall(page.read_text()):
            if status in STATUSES:
                info = STATUSES[status]
                assert (meaning, again) == (info.meaning, "no" if info.final else "yes"), page
