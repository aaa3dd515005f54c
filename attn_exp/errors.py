"""The user's mistakes: found in the parent, told in one sentence, exit code 2."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something to type differently. The message is one sentence that says what to type instead."""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'flash'? ` if one of `choices` is close to `word`, else an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'? " if near else ""
