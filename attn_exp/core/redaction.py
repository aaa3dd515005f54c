"""Redact what must never be shown or stored: passwords in URIs, tokens, and the values of secret variables."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from attn_exp.core.token_forms import without_tokens

_SECRET_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|PASSCODE|TOKEN|SECRET|CREDENTIAL|WEBHOOK|ACCESS_?KEY|API_?KEY|PRIVATE_?KEY"
    r"|(^|_)KEY$|_PWD$|(^|_)((DB)?PASS|PW|CREDS?|PAT|JWT|COOKIE|AUTH|AUTH_CONFIG|BEARER|SESSION_?ID)$|CONNECTION_?STRING",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile(r"_(URI|URL|DSN)$", re.IGNORECASE)
# In URIs of Azure and Hadoop, a container or a user stands before the @, which is not secret. A password may have
# spaces; a port has none, and is no password. Lengths are limited, here and below, because a text without end (of a
# server, or of a backend's error) would otherwise be searched to its end from each of its places.
_USER_AND_PASSWORD = re.compile(
    r"\b(?P<kept>(?:wasbs?|abfss?|hdfs)://[^:/@\s]{1,300}@)"
    r"|(?<=://)[^:/@\s]{0,300}(?::(?:\S{0,1000}|(?!\s|\d{1,5}\b)[^/\n]{1,100}))?@"
)
# The rest of a mistyped URI (`http:/me:secret@host`) still has a password before its @.
_MISTYPED = re.compile(r"(?<![^\s:/@=])[^\s:/@=]++:[^\s/]")
# `sig` is Azure's; an ODBC connection string may be one value.
_IN_QUERY = re.compile(
    r"([?&;#](?:[\w-]{0,60}(?:pass|pwd|token|secret|key|credential|signature|auth)[\w-]{0,60}"
    r"|sig|jwt|code|odbc_connect)=)[^&;\s]*",
    re.IGNORECASE,
)
# A header, as libraries quote it in their errors.
_HEADER = re.compile(
    r"(\b(?:Proxy-)?Authorization['\"]?\s*[:=]\s*['\"]?(?:(?:Basic|Bearer|Digest|Token)\s+)?)[^\s'\",;]+", re.IGNORECASE
)
_COOKIE = re.compile(r"(\b(?:Set-)?Cookie['\"]?:\s*['\"]?)[^'\"\n]+", re.IGNORECASE)
# Shorter values occur in other words by accident; so do values below the second length inside a longer text.
_SHORTEST, _SHORTEST_INSIDE = 6, 12


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a command, an address or an error's message without what `without_secrets` removes.

    Without the user and password of a mistyped URI, too.

    Args:
        text: the text to redact.
        environ: the variables to check, by default this process's.
    """
    text = without_secrets(text, environ)
    return re.sub(r"\S+", lambda found: _without_mistyped(found[0]), text) if "@" in text else text


def _without_mistyped(word: str) -> str:
    at = word.rfind("@")
    found = _MISTYPED.search(word, 0, at) if at > 0 else None
    return word if found is None else word[: found.start()] + word[at + 1 :]


def without_secrets(text: str, environ: Mapping[str, str] | None = None, shortest: int = _SHORTEST) -> str:
    """Return a text without secret values of variables, users and passwords of URIs, secrets in queries, and tokens.

    Args:
        text: the text to redact.
        environ: the variables to check, by default this process's.
        shortest: values of variables that are shorter than this stay.
    """
    for _, secret in secrets(os.environ if environ is None else environ):
        if len(secret) >= shortest:
            text = text.replace(secret, "***")
    if "://" in text and "@" in text:
        text = _USER_AND_PASSWORD.sub(lambda match: match["kept"] or "", text)
    for pattern in (_IN_QUERY, _HEADER, _COOKIE):
        text = pattern.sub(r"\1***", text)
    return without_tokens(text)


def tree_without_secrets(tree: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Return dictionaries, lists and texts in them with `without_secrets` of each text; other values as they are.

    A short value of a variable stays where it is no part of a sentence: `SORT_KEY=forward` is no reason to lose a pass.
    """
    environ = os.environ if environ is None else environ
    # Looking through all texts at once takes a third of the time, and nearly always nothing is found.
    joined = "\n".join(_texts(tree))
    if without_secrets(joined, environ) == joined:
        return tree
    return with_each_text(
        tree, lambda text: without_secrets(text, environ, _SHORTEST if " " in text else _SHORTEST_INSIDE)
    )


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            if not isinstance(value, float):
                yield from _texts(value)


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


def secrets(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and values of variables that hold a secret; of a URI only its password."""
    for name, value in environ.items():
        if is_secret(name):
            secret = value
        elif _PLACE_NAME.search(name):
            match = re.search(r"://[^:/@\s]*:(.+)@", value)
            secret = match[1] if match else ""
        else:
            continue
        # An error may quote it as it was typed or as it was meant.
        for spelled in dict.fromkeys((secret, unquote(secret))):
            if len(spelled) >= _SHORTEST:
                yield name, spelled


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
