"""Redaction: what must never be shown or kept: passwords in URIs, and the values of variables named as secrets are."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

_SECRET_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|CREDENTIAL|ACCESS_?KEY|API_?KEY|PRIVATE_?KEY|(^|_)KEY$|_PWD$",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile(r"_(URI|URL|DSN)$", re.IGNORECASE)
# Before the @ of Azure's and Hadoop's stands a container or a user that nobody has to hide.
_USER_AND_PASSWORD = re.compile(r"\b(?P<kept>(?:wasbs?|abfss?|hdfs)://[^:/@\s]+@)|(?<=://)[^:/@\s]*(?::\S*)?@")
# What is left of a URI that was mistyped (`http:/me:secret@host`) still has a password before its @.
_MISTYPED = re.compile(r"[^\s:/@=]+:[^\s/]\S*@")
# `sig` is Azure's; all of an ODBC connection may be in one value.
_IN_QUERY = re.compile(
    r"([?&;](?:[\w-]*(?:pass|pwd|token|secret|key|credential|signature|auth)[\w-]*|sig|odbc_connect)=)[^&;\s]*",
    re.IGNORECASE,
)
# A shorter value is in many words by accident; so is one of the next length inside of a longer text.
_SHORTEST, _SHORTEST_INSIDE = 6, 12


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text without user and password in every URI in it, passwords in queries, and values of secret variables.

    `environ` are the variables to look in, by default this process's own.
    """
    for _, secret in secrets(os.environ if environ is None else environ):
        text = text.replace(secret, "***")
    text = _USER_AND_PASSWORD.sub(lambda found: found["kept"] or "", text)
    text = _MISTYPED.sub("", text)
    return _IN_QUERY.sub(r"\1***", text)


def is_secret(name: str) -> bool:
    """Whether a variable is named as secrets are: `..._PASSWORD`, `..._TOKEN`, `AWS_SECRET_ACCESS_KEY`."""
    return _SECRET_NAME.search(name) is not None


def has_password(uri: str) -> bool:
    """Whether a URI shows who is asking: user and password, or a password in its query."""
    return redacted(uri, {}) != uri


def secrets(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names and values of the variables that hold a secret; of a URI with a password the password alone."""
    for name, value in environ.items():
        if is_secret(name):
            found = value
        elif _PLACE_NAME.search(name):
            match = re.search(r"://[^:/@\s]*:(\S+)@", value)
            found = match[1] if match else ""
        else:
            continue
        if len(found) >= _SHORTEST:
            yield name, found


def held_secret(texts: Iterable[str], environ: Mapping[str, str] | None = None) -> str | None:
    """The name of a secret variable whose value is among the texts, or inside of one of them; None if none is."""
    known = list(secrets(os.environ if environ is None else environ))
    if not known:
        return None
    for text in texts:
        for name, value in known:
            if value == text or (len(value) >= _SHORTEST_INSIDE and value in text):
                return name
    return None
