"""Codes of messages: each has its section in docs/troubleshooting.md, and stands where the message is read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import sweeps
from test_docs import is_message, message_texts

from attn_exp.commands.explain import COMMAND
from attn_exp.core.errors import UserError
from attn_exp.core.troubles import PAGE, TROUBLES, code_of, with_code
from attn_exp.results.result import result_of
from attn_exp.results.table import table

TEXT = (Path(__file__).resolve().parent.parent / PAGE).read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n\n(.+)\n\n", TEXT, re.MULTILINE))
QUOTED = {code: re.findall(r"`([^`]+)`", re.sub(r"\(`\w+`\)", "", line)) for code, line in SECTIONS.items()}


def test_every_code_has_its_section_and_every_section_its_code():
    assert sorted(SECTIONS) == sorted(TROUBLES) == re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert {code_of(message) for messages in QUOTED.values() for message in messages} == set(TROUBLES)


def test_the_messages_of_a_section_have_its_code_and_are_ones_of_the_program():
    texts = message_texts()
    for code, messages in QUOTED.items():
        assert messages and {code_of(message) for message in messages} == {code}
        lacking = [message for message in messages if not is_message(message, texts)]
        # PyTorch's.
        assert lacking in ([], ["OutOfMemoryError"]), code


def test_a_message_whose_sentence_is_enough_has_no_code():
    for message in ("batch=0 is not a whole number from 1 to 1,048,576", "fa3 runs only on NVIDIA GPUs", ""):
        assert with_code(message) == message


def test_a_mistake_and_a_job_s_reason_end_with_the_section(capsys):
    def run(given):
        raise UserError("the database mlflow.db was written by a newer MLflow than the installed 3.13")

    assert replace(COMMAND, run=run).main(["first"]) == 2
    assert capsys.readouterr().err.endswith(f"the installed 3.13 [{PAGE}#ae01]\n")
    wrong = sweeps.failed("wrong_kernel", "fa3", "forward: fa3 ran no kernel at all")
    assert f"* forward: fa3 ran no kernel at all [{PAGE}#ae20]" in " ".join(
        table([result_of(wrong, Path("record.json"))]).split()
    )


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("forward: the first call was within tolerance, call 7 (drawn) was not: out is off by 0.3 of its norm", "ae23"),
        ("forward: on hard values (docs/accuracy.md): out is off by 0.3 of its norm, allowed is 0.01", "ae24"),
        ("the worker exited with code 3: it printed nothing", "ae31"),
    ],
)
def test_the_first_code_that_fits_is_the_message_s(message, code):
    assert code_of(message) == code
