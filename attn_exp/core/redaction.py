"""Redact what must never be shown or stored: passwords in URIs, and the values of secret variables."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

_SECRET_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|CREDENTIAL|ACCESS_?KEY|API_?KEY|PRIVATE_?KEY|(^|_)KEY$|_PWD$"
    r"|(^|_)(PASS|PAT|JWT|COOKIE|AUTH|BEARER|SESSION_?ID)$|CONNECTION_?STRING",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile(r"_(URI|URL|DSN)$", re.IGNORECASE)
# In URIs of Azure and Hadoop, a container or a user stands before the @, which is not secret.
_USER_AND_PASSWORD = re.compile(r"\b(?P<kept>(?:wasbs?|abfss?|hdfs)://[^:/@\s]+@)|(?<=://)[^:/@\s]*(?::\S*)?@")
# The rest of a mistyped URI (`http:/me:secret@host`) still has a password before its @.
_MISTYPED = re.compile(r"[^\s:/@=]+:[^\s/]\S*@")
# `sig` is Azure's; an ODBC connection string may be one value.
_IN_QUERY = re.compile(
    r"([?&;#](?:[\w-]*(?:pass|pwd|token|secret|key|credential|signature|auth)[\w-]*|sig|jwt|code|odbc_connect)=)[^&;\s]*",
    re.IGNORECASE,
)
# A header, as libraries quote it in their errors.
_HEADER = re.compile(
    r"(\b(?:Proxy-)?Authorization['\"]?\s*[:=]\s*['\"]?(?:(?:Basic|Bearer|Digest|Token)\s+)?)[^\s'\",;]+", re.IGNORECASE
)
# Shorter values occur in other words by accident; so do values below the second length inside a longer text.
_SHORTEST, _SHORTEST_INSIDE = 6, 12


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the text without users and passwords of URIs, secrets in queries and headers, and of variables' values.

    Args:
        text: the text to redact.
        environ: the variables to check, by default this process's.
    """
    for _, secret in secrets(os.environ if environ is None else environ):
        text = text.replace(secret, "***")
    text = _USER_AND_PASSWORD.sub(lambda match: match["kept"] or "", text)
    text = _MISTYPED.sub("", text)
    return _HEADER.sub(r"\1***", _IN_QUERY.sub(r"\1***", text))


def is_secret(name: str) -> bool:
    """Whether a variable's name is that of a secret: `..._PASSWORD`, `..._TOKEN`, `AWS_SECRET_ACCESS_KEY`."""
    return _SECRET_NAME.search(name) is not None


def has_password(uri: str) -> bool:
    """Whether a URI contains a user and password, or a password in its query."""
    return redacted(uri, {}) != uri


def secrets(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and values of variables that hold a secret; of a URI only its password."""
    for name, value in environ.items():
        if is_secret(name):
            secret = value
        elif _PLACE_NAME.search(name):
            match = re.search(r"://[^:/@\s]*:(\S+)@", value)
            secret = match[1] if match else ""
        else:
            continue
        if len(secret) >= _SHORTEST:
            yield name, secret


def held_secret(texts: Iterable[str], environ: Mapping[str, str] | None = None) -> str | None:
    """Return the secret variable whose value is one of the texts or part of one; None if there is none."""
    known = list(secrets(os.environ if environ is None else environ))
    if not known:
        return None
    for text in texts:
        for name, value in known:
            if value == text or (len(value) >= _SHORTEST_INSIDE and value in text):
                return name
    return None
