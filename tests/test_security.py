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
from attn_exp.core.errors import RecordError, UserError
from attn_exp.core.profile import Profile
from attn_exp.core.record_file import FILE_NAME, LOG_NAME, read_record
from attn_exp.core.redaction import held_secret, redacted
from attn_exp.core.request import read_requests
from attn_exp.results.read import read_folder
from attn_exp.results.store import done_record, sweep_identity
from attn_exp.run.context import LOCK_NAME
from attn_exp.run.isolation import InProcess, make_isolation
from attn_exp.run.job_queue import JobQueue
from attn_exp.run.worker_variables import worker_variables
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


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", ".", "", "a/b", "a\nb", "a\0b", "-rf"])
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


@pytest.mark.parametrize("argument", ["sweep=../../x", "sweep=/tmp/x", "+backend.name=../x"])
def test_a_name_that_leads_elsewhere_is_refused_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    typed = inprocess.typed(monkeypatch, tmp_path)
    code, _, err = typed("device=cpu", "tracker=none", "backend._target_=no.Such", argument.replace("+b", "++b"))
    assert (code, "cannot name a folder" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


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
    assert {path.name for path in kept} >= {"m.db", FILE_NAME, "samples.csv"}
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


@pytest.mark.parametrize(
    "odd",
    [
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("another"),
        lambda path: path.symlink_to("."),
        os.mkfifo,
        Path.touch,
    ],
    ids=["loop", "another job's", "the sweep's", "pipe", "file"],
)
def test_what_is_no_folder_in_a_job_s_place_is_replaced(odd: object, tmp_path: Path) -> None:
    request = sweeps.job().request
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / FILE_NAME).touch()
    odd(tmp_path / request.job)  # type: ignore[operator]
    queue = JobQueue(InProcess(lambda *_: None), tmp_path)
    queue.submit(request)
    assert [path.name for path in queue.wait().folder.iterdir()] == ["request.yaml"]
    assert {path.name for path in tmp_path.iterdir()} == {"another", request.job}
    assert [path.name for path in (tmp_path / "another").iterdir()] == [FILE_NAME]


NEEDED = [
    "PATH",
    "HOME",
    "USER",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "XDG_CACHE_HOME",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NVIDIA_TF32_OVERRIDE",
    "CUDNN_LOGLEVEL_DBG",
    "NCCL_DEBUG",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_LOGS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_CACHE_DIR",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "ATTN_EXP_STATE",
]
WITHHELD = [
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "PGPASSWORD",
    "HF_TOKEN",
    "GITHUB_TOKEN",
    "SSH_AUTH_SOCK",
    "DATABASE_URL",
    "http_proxy",
    "CUDA_API_KEY",
    "ATTN_EXP_TOKEN",
    "TORCH_HUB_SECRET",
    "PYTHON_KEY",
]


def test_a_worker_gets_what_it_needs_and_no_more() -> None:
    there = dict.fromkeys((*NEEDED, *WITHHELD), "x")
    assert sorted(worker_variables(there)) == sorted(NEEDED)
    assert set(worker_variables(there, ["HF_*", "PGPASSWORD"])) - set(NEEDED) == {"HF_TOKEN", "PGPASSWORD"}


@pytest.mark.parametrize("given", ["A B", "[1]", {"A": 1}, ["A", 3], ["A=b"], [""]])
def test_names_of_variables_that_cannot_be_meant_are_refused(given: object) -> None:
    with pytest.raises(UserError, match=r"names no variable: write isolation\.variables="):
        make_isolation({"name": "warm", "timeout_s": 1, "variables": given})


def test_values_of_secret_variables_are_never_shown() -> None:
    there = {
        "MLFLOW_TRACKING_PASSWORD": "hunter2-is-mine", "AWS_SECRET_ACCESS_KEY": "abc/def+ghi", "PGPASSWORD": "short",
        "DATABASE_URL": "postgresql://me:of-the-url@host/db", "PWD": "/home/me", "KEYBOARD": "querty-layout",
    }  # fmt: skip
    text = "a hunter2-is-mine b abc/def+ghi c short d of-the-url e /home/me f querty-layout"
    assert redacted(text, there) == "a *** b *** c short d *** e /home/me f querty-layout"
    assert held_secret(["x hunter2-is-mine y"], there) == "MLFLOW_TRACKING_PASSWORD"
    assert held_secret(["of-the-url"], there) == "DATABASE_URL"
    # Too short to be told from a part of any other word.
    assert held_secret(["made of-the-url here"], there) is None


@pytest.mark.parametrize(
    "name",
    ["DB_PASS", "SMTP_PASS", "GITHUB_PAT", "GH_PAT", "JWT", "COOKIE", "AUTH", "BASIC_AUTH", "X_BEARER",
     "DOCKER_AUTH_CONFIG", "AZURE_STORAGE_CONNECTION_STRING", "SESSION_ID", "DBPASS", "TRITON_PW", "GCP_CREDS",
     "API_CRED", "VAULT_PASSCODE", "SLACK_WEBHOOK_URL"],
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
        ("GET http://host/x?code=4711abc&y=1", "GET http://host/x?code=***&y=1"),
        ("http://host/#access_token=4711abc", "http://host/#access_token=***"),
        ("http://host/x?jwt=ey.ab.c", "http://host/x?jwt=***"),
        ("{'Authorization': 'Bearer ey.ab.c', 'a': 1}", "{'Authorization': 'Bearer ***', 'a': 1}"),
        ("authorization: Basic bWU6c2VjcmV0", "authorization: Basic ***"),
        ("Proxy-Authorization=4711abc", "Proxy-Authorization=***"),
    ],
)
def test_secrets_of_queries_and_headers_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text, {}) == shown


@pytest.mark.parametrize(
    "uri", ["http:/me:secret@host", "http//me:secret@host", "me:secret@host", "http://me:s,e@cret@host"]
)
def test_a_mistyped_uri_shows_no_password(uri: str) -> None:
    assert "cret@" not in redacted(f"tracker.uri={uri}", {})
    assert redacted(f"tracker.uri={uri}", {}).endswith("host")


def test_a_password_in_an_argument_that_hydra_refuses_is_not_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = inprocess.typed(monkeypatch, tmp_path)
    for argument in (
        "tracker.uri=http://me:hush,hush@host",
        "tracker.uri=[http://me:hush@host",
        "tracker.url=http://me:hush@h",
    ):
        code, out, err = typed(argument)
        assert (code, out, "hush" in err) == (2, "", False), err


def test_a_sweep_keeps_its_identity_wherever_it_lies(tmp_path: Path) -> None:
    folder = sweeps.write(tmp_path / "a", [sweeps.job()])
    identity = sweep_identity(folder)
    assert sweep_identity(folder) == identity
    folder.rename(tmp_path / "b")
    assert sweep_identity(tmp_path / "b") == identity
    assert sweep_identity(sweeps.write(tmp_path / "c", [sweeps.job()])) != identity
    # What is no identity, and a folder that is not there, are known by their place.
    (tmp_path / "b" / "sweep.id").write_text("x" * 1000)
    assert sweep_identity(tmp_path / "b") == sweep_identity(tmp_path / "b") != identity
    assert sweep_identity(tmp_path / "none") == sweep_identity(tmp_path / "none")
    assert len(read_folder(tmp_path / "b").results) == 1


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
