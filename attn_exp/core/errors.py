"""Mistakes of the user: the parent reports each in one sentence and exits with code 2."""

import difflib
import os
import re
import signal
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

# The errors that decoding a foreign file may raise, also for endless nesting.
NOT_DECODED = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)
# The longest name of a folder, in characters.
_LONGEST = 101
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(key: str, name: Any) -> None:
    """Raise UserError unless `name` can name a folder inside another."""
    if isinstance(name, str) and len(name) > _LONGEST:
        raise UserError(f"{key}={name[:20]}... has {len(name)} characters: use at most {_LONGEST}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{key}={name} cannot name a folder: begin with a letter or digit, and use those, '.', '_' and '-'"
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder after following links."""
    # Unlike `Path.resolve`, this raises nothing for links that lead in circles.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


# A word that is longer is repeated in part: it is a value that somebody typed or a file has. Paths are shorter.
_LONGEST_SAID, _WORD_ENDS = 250, (100, 30)
_LONGEST_LINE = 10_000
_LONGEST_MESSAGE, _MESSAGE_ENDS = 1500, (900, 200)


def brief(said: object) -> str:
    """Return a message whose endless words, and which itself, are shortened in the middle."""

    def shortened(text: str, longest: int, ends: tuple[int, int]) -> str:
        return text if len(text) <= longest else f"{text[: ends[0]]}...{text[-ends[1] :]}"

    text = _WORD.sub(lambda found: shortened(found[0], _LONGEST_SAID, _WORD_ENDS), str(said))
    return shortened(text, _LONGEST_MESSAGE, _MESSAGE_ENDS)


_WORD = re.compile(rf"\S{{{_LONGEST_SAID},}}")
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: \S|$)")


class UserError(Exception):
    """A mistake of the user. The message is one sentence that says what to type instead, shortened by `brief`."""

    def __str__(self) -> str:
        return brief(super().__str__())


class RecordError(ValueError):
    """A file that is no record: truncated, of another schema, or of another shape. The message names the file."""

    def __str__(self) -> str:
        return brief(" ".join(super().__str__().split()))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if the message is empty.

    An endless line, such as a server's answer, is cut to its beginning.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_LINE]


def last_message(output: str) -> str:
    """Return the exception that ended a program, without the hints below it, or the program's last line."""
    lines = [line.rstrip() for line in output.strip().splitlines()]
    for above, line in reversed(list(pairwise(lines))):
        # The frames of a traceback are indented, the exception is not.
        if above.startswith("  ") and _RAISED.match(line):
            return line
    return lines[-1] if lines else ""


def how_it_ended(code: int) -> str:
    """Return `was killed by SIGSEGV` or `exited with code 1` for a return code of `subprocess`."""
    if code >= 0:
        return f"exited with code {code}"
    # Only the first and the last real-time signal have a name.
    named = -code in {*signal.Signals}
    return f"was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.65) -> str:
    """Return `did you mean 'flash'? ` if one of `choices` is as close to `word` as `cutoff`, else an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'? " if near else ""


def no_config_dir(folder: str) -> str:
    """Return the message for a `--config-dir` that does not exist."""
    return f"--config-dir {folder} is not a folder: give one that has backend/, model/ or other groups"
