"""Tokens that an error quotes, what came from the environment, and who may read what is written."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import rich_records
import sweeps

from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.errors import UserError
from attn_exp.core.files import be_as_private_as
from attn_exp.core.record.file import FILE_NAME, LOG_NAME, read_record, write_record
from attn_exp.core.record.profile import Profile
from attn_exp.core.record.request import Request
from attn_exp.core.redaction import redacted
from attn_exp.execution.context import open_context
from attn_exp.execution.worker import Outcome, Worker
from attn_exp.worker.attempt import error_summary
from attn_exp.worker.machine.environment import environment


def test_the_text_of_an_error_is_redacted_before_it_is_shortened() -> None:
    for words in range(300, 420):
        assert "hidden" not in error_summary(RuntimeError("x" * words + " http://me:hidden-hidden@host/"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("connect to postgresql://me:hush-hush@host/db", "connect to postgresql://host/db"),
        ("token=4096 tokens: 512 access_token=4096", "token=4096 tokens: 512 access_token=4096"),
        ("no answer from http://host:5000: ask me@example.org", "no answer from http://host:5000: ask me@example.org"),
        ("{'token': 12345678, 'pass': 'fwd'}", "{'token': 12345678, 'pass': 'fwd'}"),
    ],
)
def test_a_given_password_is_cut_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text, {}) == shown


def test_a_record_holds_nothing_of_what_a_worker_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    monkeypatch.setenv("DATABASE_URL", "db://me:pass%20word@host")
    record = rich_records.rich(sweeps.job(reason=None))
    (kernel,) = record.profiles["torch"].kernels
    told = replace(
        record,
        notes={"a-secret-of-mine": 1.0},
        profiles={
            "torch": Profile(status="ok", kernels=(replace(kernel, name="f<a-secret-of-mine>"),)),
            "ncu": Profile(status="failed", reason="login of 'pass word' for a-secret-of-mine"),
        },
    )
    write_record(told, tmp_path)
    kept = read_record(tmp_path)
    assert kept is not None
    assert kept.passes == record.passes and kept.request == record.request
    assert kept.notes == {"***": 1.0}
    assert [one.name for one in kept.profiles["torch"].kernels] == ["f<***>"]
    assert kept.profiles["ncu"].reason == "login of '***' for ***"
    write_record(record, tmp_path)
    assert read_record(tmp_path) == record


def test_a_log_holds_nothing_of_what_a_worker_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    worker = Worker(reuse=True, timeout_s=1.0)

    def ended() -> Outcome:
        worker._order.append(tmp_path)
        worker._outcomes[tmp_path] = Outcome(tmp_path)
        return worker.wait()

    (tmp_path / LOG_NAME).write_bytes(b"\xff a-secret-of-mine\nthe end\n")
    assert ended() == Outcome(tmp_path)
    assert (tmp_path / LOG_NAME).read_bytes() == b"\xff ***\nthe end\n"
    private = tmp_path / "private"
    private.write_text("a-secret-of-mine")
    (tmp_path / LOG_NAME).unlink()
    (tmp_path / LOG_NAME).symlink_to(private)
    ended()
    assert private.read_text() == "a-secret-of-mine"


def request(*overrides: str) -> Request:
    return request_from_config(resolved_config(compose_config(["device=cpu", *overrides], "s")), [])


def test_a_value_from_the_environment_is_kept_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_NAME", "something-of-mine")
    monkeypatch.setenv("MY_BATCH", "3")
    made = request("sweep=of-${oc.env:MY_NAME}", "model.name=${sweep}", "batch='${oc.decode:${oc.env:MY_BATCH}}'")
    assert made.sweep == made.model == "of-something-of-mine"
    assert made.case.batch == made.config["batch"] == 3
    assert made.config["sweep"] == "of-${oc.env:MY_NAME}"
    assert made.config["model"]["name"] == "${sweep}"
    assert "something-of-mine" not in str(made.config)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+backend.note=${oc.env:MY_NAME}"],
        ["+backend.note=[a,'${oc.env:MY_NAME}']"],
        ["+backend.note={a: 'b${oc.env:MY_NAME,none}'}"],
        ["compile.mode=default", "+compile.options.note=${oc.env:MY_NAME}"],
    ],
)
def test_a_secret_needed_by_value_is_refused(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_NAME", "something-of-mine")
    with pytest.raises(UserError, match=r"comes from the environment .*isolation\.variables=\[MY_NAME\]") as caught:
        request(*overrides)
    assert "something-of-mine" not in str(caught.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("private", "file_mode", "folder_mode"), [(True, 0o600, 0o700), (False, 0o640, 0o750)])
def test_modes_follow_the_choice(tmp_path: Path, private: bool, file_mode: int, folder_mode: int) -> None:
    before = os.umask(0o027)
    try:
        chosen = [f"folder={tmp_path}/s", "sweep=s", "tracker=none", f"private={str(private).lower()}"]
        options = resolved_config(compose_config(chosen, "s"))
        context = open_context(options, "command", lambda line: None)
        # As the queue makes a job's folder, and a worker that was started before the configuration was known goes on.
        job = context.folder / "job"
        job.mkdir()
        write_record(sweeps.job(), job)
        context.exclusive.close()
        assert os.umask(0o027) == 0o027
        # A later command that does not say it.
        later = open_context(options | {"private": False}, "command", lambda line: None)
        (later.folder / "later").touch()
        later.exclusive.close()
        assert mode(later.folder / "later") == file_mode
        be_as_private_as(job)
        (job / "of-a-worker").touch()
        assert {path.name: mode(path) for path in (context.folder, job)} == {"s": folder_mode, "job": folder_mode}
        for path in (context.folder / "command.txt", job / FILE_NAME, job / "of-a-worker"):
            assert mode(path) == file_mode, path
    finally:
        os.umask(before)


def test_only_variables_that_change_kernels_enter_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_OF_MINE", "something-of-mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    monkeypatch.setenv("CUDNN_OF_TOKEN", "something-of-mine")
    variables = environment("cpu")["variables"]
    assert variables["TRITON_CACHE_DIR"] == "/cache"
    assert "something-of-mine" not in str(variables)
