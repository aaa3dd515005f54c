"""`attn-exp duel`: measures backends of one case side by side."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_exp.commands.options import Command
from attn_exp.core.errors import UserError
from attn_exp.core.live_line import LiveLine
from attn_exp.core.options import Options, config_dir_option, option
from attn_exp.core.redaction import redacted
from attn_exp.core.text import duration

_RIVAL = re.compile(r"([a-z])(\.[^=]+)?=(.*)", re.DOTALL)
_COMPILE = re.compile(r"\.compile[.=]")


@dataclass(frozen=True, kw_only=True)
class DuelOptions(Options):
    """Measures two or more backends of one case side by side, one block each in turn (ABBA).

    Says which is faster, by how much, and whether the difference is large enough to tell.
    """

    multirun: bool = option(
        "also -m: a duel for each combination of values with commas, or of a range(FROM,TO,STEP)", short="-m", bare=True
    )
    config_dir: Path | None = config_dir_option()


def run(options: DuelOptions) -> int:
    """Run a duel, or with `-m` one for each combination; return 0, or 1 if one could not be measured."""
    folder = options.config_dir
    if not options.multirun:
        return _one(options.overrides, folder, options.command)
    from attn_exp.sweep.product import parsed_combinations

    every = parsed_combinations(options.overrides)
    # The mistakes of all, before the first is measured.
    for words in every:
        rivals_of(words)
    flags = [] if folder is None else ["--config-dir", str(folder)]
    return run_many(every, lambda words: _one(words, folder, (*words, *flags)))


def _one(overrides: Sequence[str], own_choices: Path | None, command: Sequence[str]) -> int:
    rivals, shared = rivals_of(overrides)
    with LiveLine(quiet="quiet=true" in shared) as line:
        # Importing and composing take a second.
        line.show("composing the rivals")
        from attn_exp.execution.duel import run_duel

        return int(not run_duel(rivals, shared, own_choices, command, line))


def rivals_of(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Each rival's own overrides by its letter, and those that all share.

    Raises UserError for fewer than two rivals, or options of a letter that has no backend.
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
    for letter, setting in options:
        if letter not in rivals:
            raise UserError(f"{letter} has options and no backend: write {letter}=flash, or another backend")
        rivals[letter].append(_option(setting))
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
        raise UserError("a duel needs two backends, for example: attn-exp duel a=flash b=math batch=8")
    return rivals, shared


def _option(option: str) -> str:
    """Return a backend's own option as an override, which may add keys to the backend and to compile.options."""
    if not _COMPILE.match(option):
        return f"++backend{option}"
    return f"++{option[1:]}" if option.startswith(".compile.options.") else option[1:]


def run_many(duels: Sequence[Sequence[str]], run: Callable[[Sequence[str]], int]) -> int:
    """Run the duels, each given by its words behind `attn-exp duel`, and return the largest exit code.

    A line on standard error says which one it is, and how long the rest will take. One that cannot be measured does not
    keep the others from being run.
    """
    began, codes = time.monotonic(), list[int]()
    for index, words in enumerate(duels):
        each_s = (time.monotonic() - began) / index if index else 0.0
        left = f", {duration(each_s * (len(duels) - index))} left" if index else ""
        shown = redacted(shlex.join(["attn-exp", "duel", *words]))
        print(f"[{index + 1}/{len(duels)}{left}] {shown}", file=sys.stderr, flush=True)
        codes.append(run(words))
    failed = sum(code != 0 for code in codes)
    if failed:
        print(f"{failed} of {len(duels)} duels could not be measured", file=sys.stderr)
    return max(codes, default=0)


COMMAND = Command(
    name="duel",
    usage="[-m] [--config-dir FOLDER] a=BACKEND b=BACKEND [c=BACKEND ...] [a.OPTION=VALUE ...] [KEY=VALUE ...]",
    options=DuelOptions,
    run=run,
    examples=(
        ("attn-exp duel a=flash b=cudnn batch=8 seq_len=4096", "two backends"),
        ("attn-exp duel a=flash b=math c=eager model=gpt2 causal=false", "three"),
        ("attn-exp duel a=eager b=eager b.compile=default", "one backend, compiled and not"),
        ("attn-exp duel -m a=flash b=math,eager batch=1,8", "four duels, one after another"),
    ),
    overrides=(
        ("a=BACKEND b=BACKEND ...", "the backends, a letter each"),
        ("a.OPTION=VALUE", "an option of one backend, or a.compile=MODE"),
        ("KEY=VALUE", "the case and all else, in the groups and keys that attn-exp run --help lists"),
    ),
    exits=("0 there is a verdict", "1 fewer than two backends could be measured", "2 invalid command line"),
)
main = COMMAND.main
