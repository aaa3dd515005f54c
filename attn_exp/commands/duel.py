"""python -m attn_exp.duel [--config-dir FOLDER] a=BACKEND b=BACKEND [c=BACKEND] [a.OPTION=VALUE] [KEY=VALUE] ...

Measures two or more backends of one case side by side in one process, a block each in turn (ABBA), and says which is
faster, by how much, and whether that can be told at all. Options of one rival are given behind its letter, how it is
compiled too; all other keys, and the folder of your own choices, are those of `python -m attn_exp`.

  python -m attn_exp.duel a=flash b=cudnn batch=8 seq_len=4096
  python -m attn_exp.duel a=flash b=math c=eager model=gpt2 causal=false
  python -m attn_exp.duel a=eager b=eager b.compile=default
"""

import re
import sys
from collections.abc import Sequence

from attn_exp.config.compose import split_config_dir
from attn_exp.core.errors import UserError
from attn_exp.core.redaction import redacted
from attn_exp.run.duel import run_duel

_RIVAL = re.compile(r"([a-z])(\.[^=]+)?=(.*)", re.DOTALL)
_COMPILE = re.compile(r"\.compile[.=]")


def main(arguments: Sequence[str]) -> int:
    """Run a duel; 0, or 2 after a mistake of the user's, or 1 if it could not be measured."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    try:
        words, own_choices = split_config_dir(arguments)
        rivals, shared = rivals_of(words)
        return run_duel(rivals, shared, own_choices, arguments)
    except UserError as error:
        print(f"attn_exp.duel: {redacted(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def rivals_of(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Each rival's own overrides by its letter, and those that all share.

    Raises:
        UserError: fewer than two rivals, or options of a letter that has no backend.
    """
    rivals: dict[str, list[str]] = {}
    options: list[tuple[str, str]] = []
    shared, letters = [], []
    for argument in arguments:
        match = _RIVAL.fullmatch(argument)
        if match is None:
            shared.append(argument)
        elif match[2] is None:
            letters.append(match[1])
            rivals[match[1]] = [f"backend={match[3]}"]
        else:
            options.append((match[1], f"{match[2]}={match[3]}"))
    for letter, option in options:
        if letter not in rivals:
            raise UserError(f"{letter} has options and no backend: write {letter}=flash, or another backend")
        rivals[letter].append(_option(option))
    if len(letters) > len(rivals):
        twice = next(letter for letter in rivals if letters.count(letter) > 1)
        raise UserError(f"{twice} has two backends: write each rival once, and another as c=...")
    own = {_option(option).lstrip("+").partition("=")[0]: f"{letter}{option}" for letter, option in options}
    for argument in shared:
        key = argument.lstrip("+~").partition("=")[0]
        if key == "backend":
            raise UserError(f"{argument} would be the backend of all rivals: write it as one of them, c={argument[8:]}")
        if key in own:
            raise UserError(f"{argument} is for all rivals, and {own[key]} for one: write it for each that it is for")
    if len(rivals) < 2:
        raise UserError("a duel needs two backends, for example: python -m attn_exp.duel a=flash b=math batch=8")
    return rivals, shared


def _option(option: str) -> str:
    """A rival's own option as an override. What the backend's file does not name is added to it."""
    return option.removeprefix(".") if _COMPILE.match(option) else f"++backend{option}"
