"""Options: how a command declares its arguments, how they are parsed, and what its `--help` prints."""

import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_exp.core.errors import UserError, nearest, no_config_dir
from attn_exp.core.redaction import redacted
from attn_exp.core.values import Reader, text
from attn_exp.results.there import newest

MISTAKE = 2
_KEY = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)
# Words that only Hydra takes: a key with a dot or a slash in it, or a sign before it.
_OVERRIDE = re.compile(r"[+~].*|[A-Za-z_][\w@/-]*[./@][\w./@-]*=.*", re.DOTALL)
_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Option:
    """One `name=value` of a command.

    `value` stands for the value in the help, `read` makes the value from its text, `default` is what the help says is
    taken without it. A `flag` is written `--name VALUE`, as Hydra's flags are.
    """

    name: str
    value: str
    help: str
    read: Reader = text
    default: str = ""
    choices: tuple[str, ...] = ()
    flag: bool = False
    short: str = ""

    @property
    def shown(self) -> str:
        """The option as the help writes it."""
        return f"--{self.name.replace('_', '-')} {self.value}" if self.flag else f"{self.name}={self.value}"


@dataclass(frozen=True, kw_only=True)
class Positional:
    """The words that a command takes without a name: `least` to `most` words, split at commas if `commas`."""

    name: str
    help: str
    least: int = 0
    most: int | None = None
    commas: bool = False
    example: str = ""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The parsed command line: positional words, values by option's name, overrides for Hydra, and its spelling."""

    words: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    # The command as it is written.
    command: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option, `default` where it was not given."""
        return self.values.get(name, default)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its arguments, its help, and the function that does it.

    `overrides` are the help's rows on other words, which Hydra takes; without a row there are none. `bare` are
    options that may be written as one word.
    """

    name: str
    usage: str
    about: str
    run: Callable[[Arguments], int]
    examples: tuple[tuple[str, str], ...] = ()
    positional: Positional | None = None
    options: tuple[Option, ...] = ()
    overrides: tuple[tuple[str, str], ...] = ()
    exits: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    def main(self, arguments: Sequence[str]) -> int:
        """Parse the arguments and run the command; return its exit code, 2 after a mistake of the user's."""
        if {"-h", "--help"} & set(arguments):
            print(self.help())
            return 0
        try:
            return self.run(self.parse(arguments))
        except UserError as error:
            print(f"attn-exp {self.name}: {redacted(str(error))}", file=sys.stderr)
            return MISTAKE

    def parse(self, arguments: Sequence[str]) -> Arguments:
        """Return what the arguments say.

        Raises:
            UserError: an option that does not exist, a value that cannot be meant, too many or too few words.
        """
        options = {option.name: option for option in self.options}
        short = {option.short: option.name for option in self.options if option.short}
        typed: dict[str, str] = {}
        words: list[str] = []
        overrides: list[str] = []
        following = iter(arguments)
        for word in following:
            match, dashes = _KEY.fullmatch(word.removeprefix("--")), word.startswith("-")
            key = short.get(word) or (match[1] if match else word.removeprefix("--")).replace("-", "_")
            if key in options and match is None and key not in self.bare and options[key].value == "true":
                raise UserError(f"'{word}' has no value: write {key}=true")
            if key in options and match is None and key not in self.bare and not dashes:
                words.append(word)  # it is only spelt as an option's name
            elif key in options:
                if key in typed:
                    raise UserError(f"{key} is given twice: give it once")
                value = match[2] if match else "true" if key in self.bare else next(following, "")
                if not (value or match or options[key].flag):
                    raise UserError(f"{key}= needs a value: write {key}=VALUE")
                typed[key] = value
            elif dashes or (match is not None and not self.overrides):
                what = f"{match[1]}=" if match else word
                raise UserError(f"there is no option '{what}': {self.near(key)}")
            elif match is not None or (self.overrides and _OVERRIDE.fullmatch(word)):
                overrides.append(word)
            else:
                words.append(word)
        self._check_words(words)
        values = {name: options[name].read(name, value) for name, value in typed.items()}
        written = [
            part
            for name, value in typed.items()
            for part in ((options[name].shown.split()[0], value) if options[name].flag else (f"{name}={value}",))
        ]
        commas = self.positional is not None and self.positional.commas
        split = [part for word in words for part in (word.split(",") if commas else [word])]
        if not all(split):
            raise UserError(f"'{','.join(words)}' has an empty name between its commas: leave it out")
        return Arguments(
            words=tuple(split), values=values, overrides=tuple(overrides), command=(*words, *overrides, *written)
        )

    def _check_words(self, words: Sequence[str]) -> None:
        place = self.positional
        if place is None:
            if words and self.overrides:
                raise UserError(f"'{words[0]}' is not of the form key=value: {self.examples[0][0]}")
            if words:
                raise UserError(f"{self.name} takes no name, and '{words[0]}' was given: {self.near('')}")
        elif len(words) < place.least:
            example = f"{place.example}{newest(place.name)}"
            raise UserError(f"no {place.name} was given: write one, for example {example}")
        elif place.most is not None and len(words) > place.most:
            only = "one" if place.most == 1 else f"at most {place.most}"
            raise UserError(f"{self.name} takes {only} {place.name}, and {len(words)} were given: {place.example}")

    def near(self, key: str, *more: str) -> str:
        """Return a hint about an option that does not exist: the nearest option, or else all, with `more`."""
        typed = key.lstrip("-").partition("=")[0].replace("-", "_")
        near = nearest(typed, [*(option.name for option in self.options), "help"], cutoff=0.7).rstrip()
        known = [option.shown.removesuffix(option.value).strip() for option in self.options]
        return near.replace("'help'", "'--help'") or f"the options are {', '.join([*known, *more])}"

    def help(self) -> str:
        """Return what `--help` prints."""
        rows: list[tuple[str, str]] = []
        if self.positional is not None:
            rows.append((self.positional.name, self.positional.help))
        for option in self.options:
            rows.append((option.shown, f"{option.help} (default: {option.default})" if option.default else option.help))
        rows += self.overrides
        usage = f"usage: attn-exp {self.name} {self.usage}"
        parts = [textwrap.fill(usage, _WIDTH, subsequent_indent=" " * 8), textwrap.fill(self.about, _WIDTH)]
        if self.examples:
            parts.append("examples:\n" + _examples(self.examples))
        parts.append("options:\n" + _columns([*rows, ("--help", "print this and exit")]))
        parts.append("exit codes:\n" + _columns([tuple(line.split(" ", 1)) for line in self.exits]))  # type: ignore[misc]
        return "\n\n".join(parts)


def _examples(examples: Sequence[tuple[str, str]]) -> str:
    """Commands with what each does: beside it where both fit, else on the line below."""
    width = max(len(command) for command, _ in examples)
    if width + max(len(what) for _, what in examples) + 4 <= _WIDTH:
        return "\n".join(f"  {command:<{width}}  {what}" for command, what in examples)
    return "\n".join(f"  {command}\n      {what}" for command, what in examples)


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = min(26, max(len(left) for left, _ in rows))
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, _WIDTH - width - 4)
        if len(left) > width:
            lines.append(f"  {left}")
            left = ""
        lines += [f"  {left if index == 0 else '':<{width}}  {line}".rstrip() for index, line in enumerate(wrapped)]
    return "\n".join(lines)


def _config_dir(key: str, value: str) -> Path:
    if not value or not Path(value).is_dir():
        raise UserError(no_config_dir(value or "''"))
    return Path(value).absolute()


# Options that several commands share.
CONFIG_DIR = Option(
    name="config_dir", value="FOLDER", read=_config_dir, flag=True, short="-cd",
    help="a folder with choices of your own: backend/, model/, tracker/ ...",
)  # fmt: skip
FOLDER = Option(name="folder", value="FOLDER", help="the folder that sweeps are in", default="multirun")
URI = Option(
    name="uri", value="URI", default="folders",
    help="the MLflow store to read from: uri=sqlite:///mlruns/mlflow.db, or a server: uri=http://127.0.0.1:5000",
)  # fmt: skip
# As attn_exp.tracking.location has it, whose imports would double the time of a --help.
DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
MLFLOW_EXPERIMENT = Option(
    name="mlflow_experiment", value="NAME", help="the experiment in the MLflow store", default="attn_exp"
)
