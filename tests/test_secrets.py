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
from attn_exp.core.profile import Profile
from attn_exp.core.record_file import FILE_NAME, LOG_NAME, read_record, write_record
from attn_exp.core.redaction import redacted, without_secrets
from attn_exp.core.request import Request
from attn_exp.run.context import open_context
from attn_exp.run.worker import Outcome, Worker
from attn_exp.worker.attempt import error_summary
from attn_exp.worker.machine.environment import environment

MANY = "0a1b2c3d4e5f6g7h8i9j" * 4
HEX = "0123456789abcdef" * 4
# One of each form; none was ever given out.
TOKENS = [
    "AKIA" + "ABCDEFGHIJKLMNOP",
    "ghp_" + MANY[:36],
    "github_pat_" + MANY[:22] + "_" + MANY[:59],
    "glpat-" + MANY[:20],
    "hf_" + MANY[:34],
    "sk-ant-api03-" + MANY[:40],
    "sk-proj-" + MANY[:40],
    "sk_live_" + MANY[:24],
    "sq0csp-" + MANY[:43],
    "xoxb-1234567890-" + MANY[:24],
    "https://hooks.slack.com/services/T00/B00/" + MANY[:24],
    "AIza" + MANY[:35],
    "ya29." + MANY[:40],
    "GOCSPX-" + MANY[:28],
    "npm_" + MANY[:36],
    "pypi-" + MANY[:60],
    "dapi" + HEX[:32],
    "dop_v1_" + HEX,
    "nvapi-" + MANY[:40],
    "AKCp" + MANY[:20],
    f"SG.{MANY[:22]}.{MANY[:43]}",
    HEX[:32] + "-us12",
    "AC" + HEX[:32],
    f"M{MANY[:23]}.{MANY[:6]}.{MANY[:27]}",
    "1234567890:" + MANY[:35],
    f"eyJ{MANY[:20]}.{MANY[:30]}.{MANY[:43]}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MANY}\n-----END OPENSSH PRIVATE KEY-----",
    f"PuTTY-User-Key-File-2: ssh-rsa\n{MANY}",
]


@pytest.mark.timeout(60)
def test_endless_words_are_redacted_in_a_time_that_grows_as_they_do() -> None:
    """Fails by the time limit: each of these took 4 to 20 s where every place of a text was searched to its end."""
    for piece in ("x", "a:", "://", "://a:", "wasb://a", "0a", "awsx", "?token", "x@ ://a:"):
        assert len(redacted(piece * (80_000 // len(piece)), {})) > 1000
    assert len(error_summary(RuntimeError("x" * 5_000_000))) < 500


def test_what_an_error_says_is_redacted_before_it_is_shortened() -> None:
    for words in range(300, 420):
        assert "hidden" not in error_summary(RuntimeError("x" * words + " http://me:hidden-hidden@host/"))


@pytest.mark.parametrize("token", TOKENS, ids=[token[:12].strip("-") for token in TOKENS])
def test_a_token_that_an_error_quotes_is_cut(token: str) -> None:
    for text in (f"401 for {token}", f"{{'token': '{token}'}}", f"kernel({token})"):
        shown = redacted(text, {})
        assert "***" in shown
        assert MANY[:12] not in shown and HEX[:12] not in shown and token not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("login with password=hush failed", "login with password=*** failed"),
        ("user=me password='of mine' host=x", "user=me password='*** mine' host=x"),
        ('{"api_key": "0a1b2c3d"}', '{"api_key": "***"}'),
        ("X-Api-Key: 0a1b2c3d", "X-Api-Key: ***"),
        ("-H 'Private-Token: 0a1b2c3d'", "-H 'Private-Token: ***'"),
        ("x-amz-security-token: FwoGZXIvYXdz", "x-amz-security-token: ***"),
        ("{'Set-Cookie': 'sid=0a1b2c3d; path=/'}", "{'Set-Cookie': '***'}"),
        ("Cookie: sid=0a1b2c3d; a=b\nHost: h", "Cookie: ***\nHost: h"),
        ("mysql --password hush -h host", "mysql --password *** -h host"),
        ("MYSQL_PWD=hush mysql", "MYSQL_PWD=*** mysql"),
        ("{'token': 'of-a-dict'}", "{'token': '***'}"),
        ('{"pwd" : "of-json"}', '{"pwd" : "***"}'),
        ("machine host login me password of-netrc", "machine host login me password ***"),
        ("DefaultEndpointsProtocol=https;AccountKey=0a1b2c==", "DefaultEndpointsProtocol=https;AccountKey=***"),
        ("connect to postgresql://me:two words@host/db", "connect to postgresql://host/db"),
        ("connect to postgresql://me:a\"b'c@host/db", "connect to postgresql://host/db"),
    ],
)
def test_what_is_given_for_a_password_is_cut(text: str, shown: str) -> None:
    assert redacted(text, {}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "token=4096 tokens: 512 access_token=4096",
        "--token-blocks 4 --password, and cookies: none",
        "no answer from http://host:5000: ask me@example.org",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<128, 128>>(Params) of sm90_xmma_gemm_bf16bf16_bf16f32",
        "GPU-01234567-89ab-cdef-0123-456789abcdef at " + "0123456789abcdef" * 2 + "01234567",
        "2026-11-23_04-21-38-abcd/flash-0123456789",
        "task-oriented-disk-scheduling-of-blocks",
        "a key: value, and a password that nobody gave",
        "the login page, and its password field",
        "{'token': 12345678, 'pass': 'fwd', 'auth': None}",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text, {}) == text


def test_a_record_holds_nothing_of_what_a_worker_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    monkeypatch.setenv("SORT_KEY", "forward")
    monkeypatch.setenv("DATABASE_URL", "db://me:pass%20word@host")
    record = rich_records.rich(sweeps.job(reason=None))
    (kernel,) = record.profiles["torch"].kernels
    told = replace(
        record,
        notes={"a-secret-of-mine": 1.0, TOKENS[1]: 2.0},
        profiles={
            "torch": Profile(status="ok", kernels=(replace(kernel, name=f"f<{TOKENS[4]}>"),)),
            "ncu": Profile(status="failed", reason="login of 'pass word' for a-secret-of-mine and forward"),
        },
    )
    write_record(told, tmp_path)
    kept = read_record(tmp_path)
    assert kept is not None
    # A word that is no sentence stays: a record without its passes is lost.
    assert kept.passes == record.passes and kept.request == record.request
    assert kept.notes == {"***": 2.0}
    assert [one.name for one in kept.profiles["torch"].kernels] == ["f<***>"]
    assert kept.profiles["ncu"].reason == "login of '***' for *** and ***"
    write_record(record, tmp_path)
    assert read_record(tmp_path) == record


def test_a_log_holds_nothing_of_what_a_worker_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-mine")
    worker = Worker(reuse=True, timeout_s=1.0)
    monkeypatch.setattr(worker, "_ended", lambda: Outcome(tmp_path))
    (tmp_path / LOG_NAME).write_bytes(b"\xff a-secret-of-mine\n" + TOKENS[4].encode() + b"\nthe end\n")
    assert worker.wait() == Outcome(tmp_path)
    assert (tmp_path / LOG_NAME).read_bytes() == b"\xff ***\n***\nthe end\n"
    private = tmp_path / "private"
    private.write_text("a-secret-of-mine")
    (tmp_path / LOG_NAME).unlink()
    (tmp_path / LOG_NAME).symlink_to(private)
    worker.wait()
    assert private.read_text() == "a-secret-of-mine"


def request(*overrides: str) -> Request:
    return request_from_config(resolved_config(compose_config(["device=cpu", *overrides], "s")), [])


def test_what_came_from_the_environment_is_kept_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_a_worker_would_need_by_value_is_refused(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_NAME", "something-of-mine")
    with pytest.raises(UserError, match=r"comes from the environment .*isolation\.variables=\[MY_NAME\]") as caught:
        request(*overrides)
    assert "something-of-mine" not in str(caught.value)


def test_a_token_that_is_typed_into_an_option_is_refused() -> None:
    with pytest.raises(UserError, match=r"backend\.note holds a token or key, which would be kept") as caught:
        request(f"+backend.note={TOKENS[4]}")
    assert TOKENS[4] not in str(caught.value)


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
        be_as_private_as(job)
        (job / "of-a-worker").touch()
        assert {path.name: mode(path) for path in (context.folder, job)} == {"s": folder_mode, "job": folder_mode}
        for path in (context.folder / "command.txt", job / FILE_NAME, job / "of-a-worker"):
            assert mode(path) == file_mode, path
    finally:
        os.umask(before)


def test_private_is_true_or_false(tmp_path: Path) -> None:
    options = resolved_config(compose_config([f"folder={tmp_path}/s", "tracker=none", "private=perhaps"], "s"))
    with pytest.raises(UserError, match="private=perhaps is neither true nor false"):
        open_context(options, "command", lambda line: None)


def test_only_variables_that_change_kernels_enter_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_OF_MINE", "something-of-mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", f"/cache/{TOKENS[4]}")
    monkeypatch.setenv("CUDNN_OF_TOKEN", "something-of-mine")
    variables = environment("cpu")["variables"]
    assert variables["TRITON_CACHE_DIR"] == "/cache/***"
    assert "something-of-mine" not in str(variables)
