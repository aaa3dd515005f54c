"""What other people's files, names and links cannot do, and what a worker is not told."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import inprocess
import msgspec
import pytest
import sweeps
import yaml

from attn_exp.commands.compare import main as compare_main
from attn_exp.commands.log import main as log_main
from attn_exp.core.errors import RecordError
from attn_exp.core.record.file import FILE_NAME, LOG_NAME, read_record
from attn_exp.core.record.profile import Profile
from attn_exp.core.record.request import read_requests
from attn_exp.core.redaction import held_secret, redacted
from attn_exp.execution.context import LOCK_NAME
from attn_exp.execution.worker_process import worker_variables
from attn_exp.results.read import read_folder
from attn_exp.results.store import done_record
from attn_exp.worker.__main__ import _log_into

ROOT = Path(__file__).resolve().parent.parent
# What runs code that it reads, or may: none of them is called anywhere in the package.
_FORBIDDEN = {
    "pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib.load", "eval", "exec", "unsafe_load", "full_load",
    "load_all", "torch.load", "yaml.load", "numpy.load", "np.load", "os.system",
}  # fmt: skip


def called(path: Path) -> set[str]:
    """What a module imports and calls, as it is written there."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
            found |= {"shell=True"} if any(word.arg == "shell" for word in node.keywords) else set()
    return found


def test_nothing_loads_pickles_or_runs_what_it_reads() -> None:
    for path in (ROOT / "attn_exp").rglob("*.py"):
        assert not called(path) & (_FORBIDDEN | {"shell=True"}), path
    assert {"ast", "yaml.safe_dump"} <= called(Path(__file__))


def evil(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep whose records name a module here that leaves a trace when it is imported, or anything in it called."""
    (home / "evil.py").write_text("open('trace', 'w')\nclass Boom:\n    def __init__(self, **_):\n        pass\n")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    options = {"_target_": "evil.Boom", "nested": {"_target_": "evil.Boom"}}
    records = [
        sweeps.job(name, us, options=options, reason=None, of=sweeps.case(seq_len=n))
        for name, us in (("flash", 100.0), ("math", 90.0))
        for n in (256, 512)
    ]
    records = [
        replace(
            one,
            request=replace(
                one.request,
                job=f"job-{index}",
                backend=one.request.backend | {"name": f"<script>alert({index // 2})</script>"},
                config={"a": {"_target_": "evil.Boom"}},
            ),
        )
        for index, one in enumerate(records)
    ]
    return sweeps.write(home / "multirun" / "theirs", records)


def test_reading_other_people_s_records_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = evil(tmp_path, monkeypatch)
    assert len(list(read_folder(folder).records())) == 4
    assert compare_main(["theirs", "out=report.html", "plots=pictures"]) == 0
    assert "<script>alert" not in (tmp_path / "report.html").read_text()
    assert log_main(["theirs", "tracker.uri=sqlite:///m/m.db", "tracker.artifacts=m/artifacts"]) == 0, (
        capsys.readouterr()
    )
    assert "4 new" in capsys.readouterr().out
    first = read_record(folder / "job-0")
    assert first is not None and done_record(first.request, folder / "job-0") == first
    assert not (tmp_path / "trace").exists()
    __import__("evil")
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "", "a\0b", "-rf"])
def test_a_name_that_leads_elsewhere_is_refused_from_whoever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "job").mkdir()
    tree = msgspec.to_builtins(sweeps.job())
    for key in ("job", "sweep"):
        changed = tree | {"request": tree["request"] | {key: name}}
        (tmp_path / "job" / FILE_NAME).write_bytes(msgspec.json.encode(changed))
        with pytest.raises(RecordError, match=f"{key}="):
            read_record(tmp_path / "job")
        for file, content in (("request.yaml", changed["request"]), ("duel.yaml", [changed["request"]])):
            (tmp_path / file).write_text(yaml.safe_dump(content))
            with pytest.raises(RecordError, match="cannot name a folder"):
                read_requests(tmp_path)
            (tmp_path / file).unlink()


def test_links_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").mkdir()
    private = tmp_path / "private" / "key"
    private.write_text("very private")
    files = ("../../../private/key", str(private), "profiles/../../../../private/key", "linked/key", "record.json")
    told = replace(sweeps.job("math"), profiles={"torch": Profile(status="ok", files=files)})
    folder = sweeps.write(tmp_path / "multirun" / "first", [sweeps.job(), told])
    (folder / told.request.job / "linked").symlink_to(private.parent)
    outside = sweeps.write(tmp_path / "elsewhere" / "first", [sweeps.job("eager")])
    (stolen,) = [path for path in outside.iterdir() if path.is_dir()]
    (folder / stolen.name).symlink_to(stolen)
    for link in ("table.txt", "command.txt", f"{sweeps.job().request.job}/{LOG_NAME}"):
        (folder / link).symlink_to(private)
    (folder / "plots").symlink_to(private.parent)
    assert log_main(["first", "tracker.uri=sqlite:///m/m.db", "tracker.artifacts=m/artifacts"]) == 3
    out, err = capsys.readouterr()
    assert "2 records, 2 new" in out
    assert "is a link that leads out of the sweep's folder" in err
    kept = [path for path in (tmp_path / "m").rglob("*") if path.is_file()]
    assert {path.name for path in kept} >= {"m.db", FILE_NAME}
    assert [path for path in kept if b"very private" in path.read_bytes()] == []
    # The worker's log is no way to write there either, and a job's folder is none.
    with pytest.raises(OSError, match="symbolic links"):
        _log_into(folder / sweeps.job().request.job)
    assert private.read_text() == "very private"


def test_a_job_s_folder_that_is_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = inprocess.typed(monkeypatch, tmp_path)
    quick = ("device=cpu", "tracker=none", "sweep=a", "backend=eager", "seq_len=32")
    name = typed(*quick, "dry_run=true")[1].split()[-1]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "multirun" / "a").mkdir(parents=True)
    (tmp_path / "multirun" / "a" / LOCK_NAME).touch()
    (tmp_path / "multirun" / "a" / name).symlink_to(tmp_path / "elsewhere")
    code, _, err = typed(*quick)
    assert (code, "is a link that leads out of the sweep's folder: remove it" in err) == (2, True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


NEEDED = [
    "PATH",
    "HOME",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "ATTN_EXP_STATE",
]
WITHHELD = [
    "MLFLOW_TRACKING_PASSWORD",
    "AWS_SECRET_ACCESS_KEY",
    "PGPASSWORD",
    "HF_TOKEN",
    "SSH_AUTH_SOCK",
    "DATABASE_URL",
    "http_proxy",
    "CUDA_API_KEY",
    "ATTN_EXP_TOKEN",
]


def test_a_worker_gets_what_it_needs_and_no_more() -> None:
    there = dict.fromkeys((*NEEDED, *WITHHELD), "x")
    assert sorted(worker_variables(there)) == sorted(NEEDED)
    assert set(worker_variables(there, ["HF_*", "PGPASSWORD"])) - set(NEEDED) == {"HF_TOKEN", "PGPASSWORD"}


def test_values_of_secret_variables_are_never_shown() -> None:
    there = {
        "MLFLOW_TRACKING_PASSWORD": "hunter2-is-mine", "AWS_SECRET_ACCESS_KEY": "abc/def+ghi", "MAX_TOKENS": "12345678",
        "PGPASSWORD": "short",
        "DATABASE_URL": "postgresql://me:of-the-url@host/db", "PWD": "/home/me", "KEYBOARD": "querty-layout",
    }  # fmt: skip
    text = "a hunter2-is-mine b abc/def+ghi c short d of-the-url e /home/me f querty-layout g 12345678"
    assert redacted(text, there) == "a *** b *** c short d *** e /home/me f querty-layout g 12345678"
    assert held_secret(["x hunter2-is-mine y"], there) == "MLFLOW_TRACKING_PASSWORD"
    assert held_secret(["of-the-url"], there) == "DATABASE_URL"


@pytest.mark.parametrize(
    "name",
    ["DB_PASS", "SMTP_PASS", "GITHUB_PAT", "GH_PAT", "JWT", "COOKIE", "AUTH", "BASIC_AUTH", "X_BEARER",
     "AZURE_STORAGE_CONNECTION_STRING", "DBPASS", "GCP_CREDS", "SLACK_WEBHOOK_URL", "OAUTH", "ENCRYPTION_KEYS"],
)  # fmt: skip
def test_these_names_are_of_secrets(name: str) -> None:
    assert redacted("it is much-too-long-to-guess", {name: "much-too-long-to-guess"}) == "it is ***"


@pytest.mark.parametrize(
    "name", ["PATH", "COMPASS", "PATTERN", "AUTHOR", "BYPASS", "COOKIES_ALLOWED", "SSH_AUTH_SOCK", "SACRED"]
)
def test_these_names_are_not(name: str) -> None:
    assert redacted("it is much-too-long-to-guess", {name: "much-too-long-to-guess"}) == "it is much-too-long-to-guess"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://host/x?access_token=4711abc&y=1", "GET http://host/x?access_token=***&y=1"),
        ("{'Authorization': 'Bearer ey.ab.c', 'a': 1}", "{'Authorization': 'Bearer ***', 'a': 1}"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=A/20, Signature=4711abc", "Authorization: AWS4-HMAC-SHA256 ***"),
    ],
)
def test_secrets_of_queries_and_headers_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text, {}) == shown


def test_the_compose_file_is_pinned_bound_to_loopback_and_holds_no_password() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        if "image" in service:
            assert service["image"].partition(":")[2][:1].isdigit()
        assert not any("PASSWORD" in name and not name.endswith("_FILE") for name in service["environment"])
    assert "ports" not in compose["services"]["database"]
    assert all((ROOT / "docker" / one["file"]).parent.name == "secrets" for one in compose["secrets"].values())
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text().split()
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    built = (ROOT / "docker/server.Dockerfile").read_text()
    assert f"mlflow=={pinned['mlflow']}" in built
    assert f"psycopg[binary]=={pinned['psycopg']}" in built
    assert os.path.exists(ROOT / "docker" / compose["services"]["mlflow"]["build"]["dockerfile"])
