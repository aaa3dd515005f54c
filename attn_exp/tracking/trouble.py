"""Describe in words what is wrong with a store, from the exceptions of MLflow and the libraries below it."""

import re

from attn_exp.core.errors import first_line
from attn_exp.core.redaction import redacted

_LONGEST = 300
_LOGIN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")
# In the words of urllib3 and the C library, the most specific first.
_UNREACHABLE = re.compile(
    r"Connection refused|Failed to resolve '[^']*'|Name or service not known|Network is unreachable|No route to host"
    r"|timed out|Connection reset by peer|Remote end closed connection|certificate verify failed|WRONG_VERSION_NUMBER"
    r"|too many \d+ error responses"
)
_TOO_LONG = re.compile(r"an answer of more than \d+ MiB")
# In the words of sqlite (https://sqlite.org/rescode.html: FULL, READONLY, IOERR) and of the C library.
_OF_DISK = (
    (re.compile(r"database or disk is full|No space left on device"), "no space is left on its disk"),
    (re.compile(r"Disk quota exceeded|File too large"), "its disk takes no more of this user: a quota or a limit"),
    (re.compile(r"write a readonly database|Read-only file system"), "it is read-only"),
    (re.compile(r"disk I/O error|Input/output error"), "its disk can be full or broken: disk I/O error"),
)
# What SQLAlchemy puts above the message of the database (StatementError.add_detail): where in its own work it was.
_REMARK = re.compile(r"\A\s*\(raised as a result of [^\n]*\)\n")


class ArtifactError(RuntimeError):
    """The store accepted the metrics but not the files."""


def refusal(error: Exception, option: str = "tracker.uri") -> str | None:
    """Return what to do if a store refused the user or is not MLflow; None for trouble that may pass.

    Args:
        error: what MLflow or a library below it raised.
        option: how the command spells the address of the store.
    """
    code, text = getattr(error, "error_code", None), str(error)
    if code in _REFUSALS:
        body = re.search(r"Response body: '(.*)", text, re.DOTALL)
        message = redacted(first_line(Exception(body[1].rstrip("'") if body else text)))[:_LONGEST]
        return f"refuses this user ({message}): {_LOGIN}"
    if code == "ENDPOINT_NOT_FOUND" or "not in a valid JSON format" in text:
        return f"is not an MLflow server: use {option}=http://HOST:5000"
    if "password authentication failed" in text:
        return f"refuses this user (password authentication failed): give another user or password in {option}="
    return None


def disk_trouble(error: Exception) -> str | None:
    """Return what is wrong with the disk of a store, None if nothing is."""
    # Below the first line, a database's library quotes what was to be written.
    said = _first_line(error)
    return next((words for pattern, words in _OF_DISK if pattern.search(said)), None)


def _first_line(error: Exception) -> str:
    return first_line(Exception(_REMARK.sub("", str(error)).strip() or type(error).__name__))


def trouble(error: Exception, option: str = "tracker.uri") -> str:
    """Return what went wrong, in a few words without passwords; `option` as in `refusal`."""
    text = str(error)
    if (too_long := _TOO_LONG.search(text)) is not None:
        return f"it sent {too_long[0]}, which was not read further"
    matches = _UNREACHABLE.search(text)
    on_disk = disk_trouble(error)
    if isinstance(error, ArtifactError):
        if on_disk is not None:
            return f"its artifact store: {on_disk}"
        message = matches[0] if matches else first_line(error)
        return redacted(f"its artifact store accepted no files (full or read-only?), see its log: {message}")[:_LONGEST]
    if on_disk is not None:
        return on_disk
    refused = refusal(error, option)
    if refused is not None:
        return refused
    if matches is not None and _is_network(error):
        return f"it cannot be reached: {matches[0]}"
    return redacted(_first_line(error))[:_LONGEST]


def _is_network(error: BaseException | None) -> bool:
    while error is not None:
        module = type(error).__module__
        if (
            module.startswith(("requests", "urllib3", "psycopg"))
            or "HTTPConnectionPool" in str(error)
            or "HTTPSConnectionPool" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
