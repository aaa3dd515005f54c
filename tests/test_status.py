"""Statuses have one home, core/status.py; the files that set them agree with it. tests/test_docs.py has the table."""

import re
from pathlib import Path
from typing import get_args

import pytest

import attn_exp
from attn_exp.core.status import STATUSES, Status

PACKAGE = Path(attn_exp.__file__).parent
# How a status is set: given to Stopped, Outcome or Record, assigned, or returned with its reason.
SETS = (
    r'(?:Stopped\(|Untrusted\(|Outcome\(folder, |status=|status = |status: Status = |self.reason = ).*"%s"|or "%s"'
    r'|return "%s",|return .*"%s" if |else "%s", summary'
)


def test_the_table_has_every_status():
    assert tuple(STATUSES) == get_args(Status)


@pytest.mark.parametrize("status", STATUSES)
def test_the_files_that_set_a_status_are_those_of_the_table(status):
    sets = re.compile(SETS.replace("%s", status))
    setting = set()
    # A profile has statuses of its own, and what a hunt finds is not a job's.
    others = {*(PACKAGE / "profilers").glob("*.py"), *(PACKAGE / "hunt").glob("*.py")}
    for path in set(PACKAGE.glob("**/*.py")) - others:
        lines = [line for line in path.read_text().splitlines() if "Profile(" not in line]
        setting |= {str(path.relative_to(PACKAGE)) for line in lines if sets.search(line)}
    assert setting == set(STATUSES[status].set_by)
