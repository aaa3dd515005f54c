"""Redact what must never be shown or stored: passwords in URIs, and the values of secret variables."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_SECRET_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|CREDENTIAL|WEBHOOK|ACCESS_?KEY|API_?KEY|PRIVATE_?KEY|CONNECTION_?STRING"
    r"|(^|_)(KEYS?|PWD|(DB)?PASS|PW|CREDS?|PAT|JWT|COOKIES?|O?AUTH|BEARER)$",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile(r"_(URI|URL|DSN)$", re.IGNORECASE)
# In URIs of Azure and Hadoop, a container or a user stands before the @, which is not secret.
_USER_AND_PASSWORD = re.compile(
    r"\b(?P<kept>(?:wasbs?|abfss?|hdfs)://[^:/@\s]{1,300}@)|(?<=://)[^:/@\s]{0,300}(?::\S{0,1000})?@"
)
_IN_QUERY = re.compile(
    r"([?&;](?:[\w-]{0,60}(?:pass|pwd|token|secret|key|credential|signature|auth)[\w-]{0,60}|sig)=)[^&;\s]*",
    re.IGNORECASE,
)
# A header, as libraries quote it in their errors. Its scheme stays.
_HEADER = re.compile(r"(\bAuthorization['\"]?\s?[:=]\s?['\"]?(?:[\w-]+\s)?)[^'\"\n]+", re.IGNORECASE)
# Shorter values occur in other words by accident.
_SHORTEST = 8


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a text without secret values of variables, users and passwords of URIs, and secrets in queries.

    `environ` are the variables to check, by default this process's.
    """
    for _, secret in _secrets(os.environ if environ is None else environ):
        text = text.replace(secret, "***")
    if "://" in text and "@" in text:
        text = _USER_AND_PASSWORD.sub(lambda match: match["kept"] or "", text)
    return _HEADER.sub(r"\1***", _IN_QUERY.sub(r"\1***", text))


def with_each_text(tree: Any, changed: Callable[[str], str]) -> Any:
    """Return dictionaries, lists and texts in them with what `changed` makes of each text; other values as they are."""
    if isinstance(tree, str):
        return changed(tree)
    if isinstance(tree, dict):
        return {with_each_text(key, changed): with_each_text(value, changed) for key, value in tree.items()}
    return [with_each_text(value, changed) for value in tree] if isinstance(tree, (list, tuple)) else tree


def is_secret(name: str) -> bool:
    """Whether a variable's name is that of a secret: `..._PASSWORD`, `..._TOKEN`, `AWS_SECRET_ACCESS_KEY`."""
    return _SECRET_NAME.search(name) is not None


def has_password(uri: str) -> bool:
    """Whether a URI contains a user and password, or a password in its query."""
    return redacted(uri, {}) != uri


def held_secret(texts: Iterable[str], environ: Mapping[str, str] | None = None) -> str | None:
    """Return the secret variable whose value is one of the texts or part of one; None if there is none."""
    known = list(_secrets(os.environ if environ is None else environ))
    return next((name for text in texts for name, value in known if value in text), None) if known else None


def _secrets(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and values of variables that hold a secret; of a URI only its password. Numbers are no secrets."""
    for name, value in environ.items():
        if is_secret(name):
            secret = value
        elif _PLACE_NAME.search(name) and (match := re.search(r"://[^:/@\s]*:(.+)@", value)):
            secret = match[1]
        else:
            continue
        if len(secret) >= _SHORTEST and not secret.isdecimal() and not os.path.isabs(secret):
            # An error may quote it as it was typed or as it was meant.
            yield from dict.fromkeys(((name, secret), (name, unquote(secret))))
