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


class ArtifactError(RuntimeError):
    """The store accepted the metrics but not the files."""


def refusal(error: Exception, option: str = "tracker.uri") -> str | None:
    """Return what to do if a store refused the user or is not MLflow; None for trouble that may pass."""
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


def trouble(error: Exception, option: str = "tracker.uri") -> str:
    """Return what went wrong, in a few words without passwords; `option` as in `refusal`."""
    matches = _UNREACHABLE.search(str(error))
    if isinstance(error, ArtifactError):
        message = matches[0] if matches else first_line(error)
        return redacted(f"its artifact store accepted no files (full or read-only?), see its log: {message}")[:_LONGEST]
    if refused := refusal(error, option):
        return refused
    return f"it cannot be reached: {matches[0]}" if matches else redacted(first_line(error))[:_LONGEST]
