"""Commands: what is around their options, how arguments are parsed, and what their `--help` prints."""

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from attn_exp.core.errors import UserError, nearest
from attn_exp.core.options import Option, Options, declared
from attn_exp.core.redaction import redacted
from attn_exp.results.there import newest

MISTAKE = 2
_KEY = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)
# Words that only Hydra takes: a key with a dot or a slash in it, or a sign before it.
_OVERRIDE = re.compile(r"[+~].*|[A-Za-z_][\w@/-]*[./@][\w./@-]*=.*", re.DOTALL)
_WIDTH = 100
# As attn_exp.tracking.location has it, whose imports would double the time of a --help.
DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
Chosen = TypeVar("Chosen", bound=Options)


@dataclass(frozen=True, kw_only=True)
class Command(Generic[Chosen]):
    """A command: the class of its options, the rest of its help, and the function that does it.

    `overrides` are the help's rows on other words, which Hydra takes; without a row there are none.
    """

    name: str
    usage: str
    options: type[Chosen]
    run: Callable[[Chosen], int]
    examples: tuple[tuple[str, str], ...]
    overrides: tuple[tuple[str, str], ...] = ()
    exits: tuple[str, ...]

    @cached_property
    def named(self) -> dict[str, Option]:
        """The options that are written with their names."""
        return {one.name: one for one in declared(self.options) if not one.example}

    @cached_property
    def place(self) -> Option | None:
        """The option that is written without its name, if there is one."""
        return next((one for one in declared(self.options) if one.example), None)

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

    def parse(self, arguments: Sequence[str]) -> Chosen:
        """Return what the arguments say.

        Raises UserError for an option that does not exist, a value that cannot be meant, too many or too few words.
        """
        named = self.named
        short = {one.short: name for name, one in named.items() if one.short}
        typed: dict[str, str] = {}
        words, overrides, written = list[str](), list[str](), list[str]()
        following = iter(arguments)
        for word in following:
            match, dashes = _KEY.fullmatch(word.removeprefix("--")), word.startswith("-")
            key = short.get(word) or (match[1] if match else word.removeprefix("--")).replace("-", "_")
            known = named.get(key)
            if known and match is None and not known.bare and known.value == "true":
                raise UserError(f"'{word}' has no value: write {key}=true")
            if known and (match or known.bare or dashes):
                if key in typed:
                    raise UserError(f"{key} is given twice: give it once")
                value = match[2] if match else "true" if known.bare else next(following, "")
                if not (value or match or known.flag):
                    raise UserError(f"{key}= needs a value: write {key}=VALUE")
                typed[key] = value
                written += [known.shown.split()[0], value] if known.flag else [f"{key}={value}"]
            elif dashes or (match is not None and not self.overrides):
                what = f"{match[1]}=" if match else word
                raise UserError(f"there is no option '{what}': {self.near(key)}")
            elif match is not None or (self.overrides and _OVERRIDE.fullmatch(word)):
                overrides.append(word)
            else:
                words.append(word)
        self._check_words(words)
        values = {named[name].field: named[name].parse(value) for name, value in typed.items()}
        if self.place and words:
            split = [part for word in words for part in (word.split(",") if self.place.several else [word])]
            if not all(split):
                raise UserError(f"'{','.join(words)}' has an empty name between its commas: leave it out")
            values[self.place.field] = tuple(split) if self.place.several else self.place.parse(split[0])
        return self.options(**values, overrides=tuple(overrides), command=(*words, *overrides, *written))

    def _check_words(self, words: Sequence[str]) -> None:
        place = self.place
        if place is None:
            if words and self.overrides:
                raise UserError(f"'{words[0]}' is not of the form key=value: {self.examples[0][0]}")
            if words:
                raise UserError(f"{self.name} takes no name, and '{words[0]}' was given: {self.near('')}")
        elif place.needed and not words:
            example = f"{place.example}{newest(place.value)}"
            raise UserError(f"no {place.value} was given: write one, for example {example}")
        elif len(words) > 1 and not place.several:
            raise UserError(f"{self.name} takes one {place.value}, and {len(words)} were given: {place.example}")

    def near(self, key: str, *more: str) -> str:
        """Return a hint about an option that does not exist: the nearest option, or else all, with `more`."""
        typed = key.lstrip("-").partition("=")[0].replace("-", "_")
        near = nearest(typed, [*self.named, "help"], cutoff=0.7).rstrip()
        known = [option.shown.removesuffix(option.value).strip() for option in self.named.values()]
        return near.replace("'help'", "'--help'") or f"the options are {', '.join([*known, *more])}"

    def help(self) -> str:
        """Return what `--help` prints."""
        rows = [
            (one.shown, f"{one.about} (default: {one.default})" if one.default else one.about)
            for one in filter(None, (self.place, *self.named.values()))
        ]
        usage, about = f"usage: attn-exp {self.name} {self.usage}", " ".join((self.options.__doc__ or "").split())
        return "\n\n".join(
            (
                textwrap.fill(usage, _WIDTH, subsequent_indent=" " * 8),
                textwrap.fill(about, _WIDTH),
                "examples:\n" + _examples(self.examples),
                "options:\n" + _columns([*rows, *self.overrides, ("--help", "print this and exit")]),
                "exit codes:\n" + _columns([(line[0], line[2:]) for line in self.exits]),
            )
        )


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
