"""Options: how a command declares its arguments, how they are parsed (by argparse), and what its `--help` prints."""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from attn_exp.core.errors import UserError, nearest, no_config_dir, no_dashes
from attn_exp.core.redaction import redacted
from attn_exp.core.values import Reader, text

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


class _Once(argparse.Action):
    """Keep an option's text; refuse a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise UserError(f"{self.dest} is given twice: give it once")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        missing = re.search(r"argument (?:-\w+/)?--([\w-]+).*expected one argument", message)
        if missing:
            raise UserError(f"{missing[1]}= needs a value: write {missing[1]}=VALUE")
        raise UserError(message)


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
        prepared = _Prepared(self)
        for word in arguments:
            prepared.take(word)
        parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, usage="")
        for option in self.options:
            short = (option.short,) if option.short else ()
            # A flag without a value is empty text, which its reader explains.
            more: dict[str, Any] = {"nargs": "?", "const": ""} if option.flag else {}
            parser.add_argument(*short, f"--{option.name}", dest=option.name, action=_Once, **more)
        overrides = prepared.overrides
        namespace, rest = parser.parse_known_args(prepared.words)
        typed: dict[str, str] = vars(namespace)
        words = [word for word in rest if not word.startswith("-")]
        self._check_words(words, [word for word in rest if word.startswith("-")])
        options = {option.name: option for option in self.options}
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
            words=tuple(split),
            values=values,
            overrides=tuple(overrides),
            command=(*words, *overrides, *written),
        )

    def _check_words(self, words: Sequence[str], flags: Sequence[str]) -> None:
        for flag in flags:
            self.check_dashes(flag)
            raise UserError(f"there is no option '{flag.partition('=')[0]}': {self.near(flag)}")
        place = self.positional
        if place is None:
            if words and self.overrides:
                raise UserError(f"'{words[0]}' is not of the form key=value: {self.examples[0][0]}")
            if words:
                raise UserError(f"{self.name} takes no name, and '{words[0]}' was given: {self.near('')}")
        elif len(words) < place.least:
            raise UserError(f"no {place.name} was given: write one, for example {place.example}")
        elif place.most is not None and len(words) > place.most:
            only = "one" if place.most == 1 else f"at most {place.most}"
            raise UserError(f"{self.name} takes {only} {place.name}, and {len(words)} were given: {place.example}")

    def check_dashes(self, word: str) -> None:
        """Raise UserError for `--key` or `--key=value` that is near to no option, if the command takes overrides."""
        key = word.removeprefix("--").partition("=")[0].replace("-", "_")
        known = [one.name for one in self.options]
        if self.overrides and word.startswith("--") and not nearest(key, known, cutoff=0.7):
            raise no_dashes(word)

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


class _Prepared:
    """Words as argparse takes them: `key=value` becomes `--key=value`."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.options = {option.name: option for option in command.options}
        self.words: list[str] = []
        self.overrides: list[str] = []
        self._truth = False
        # Flags that may be one letter: -m.
        self._long = {one.short: f"--{one.name}" for one in command.options if one.short and one.name in command.bare}

    def take(self, word: str) -> None:
        """Take the next word of the command line."""
        word = self._long.get(word, word)
        match = _KEY.fullmatch(word.removeprefix("--"))
        dashes = word.startswith("--")
        bare = word.removeprefix("--").replace("-", "_")
        if self._truth and word in ("true", "false"):
            self.words[-1] = f"{self.words[-1].partition('=')[0]}={word}"
            self._truth = False
            return
        self._truth = False
        if match is not None:
            self._pair(word, match[1], match[2], dashes=dashes)
        elif bare in self.command.bare and (dashes or bare == word):
            self._truth = dashes
            self.words.append(f"--{bare}=true")
        elif bare in self.options and self.options[bare].value == "true" and (dashes or bare == word):
            raise UserError(f"'{word}' has no value: write {bare}=true")
        elif dashes and bare in self.options:
            self.words.append(f"--{bare}")
        elif self.command.overrides and _OVERRIDE.fullmatch(word):
            self.overrides.append(word)
        else:
            self.words.append(word)

    def _pair(self, word: str, name: str, value: str, *, dashes: bool) -> None:
        key = name.replace("-", "_")
        if key in self.options and (dashes or not self.options[key].flag):
            self.words.append(f"--{key}={value}")
        elif name in self.options:
            self.words.append(f"--{name}={value}")
        elif dashes or not self.command.overrides:
            self.command.check_dashes(word)
            raise UserError(f"there is no option '{name}=': {self.command.near(name)}")
        else:
            self.overrides.append(word)


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
