"""What the TAB key offers, as Hydra's shell functions ask for it: `attn-exp -sc query=bash` with the line in COMP_LINE.

Hydra answers too, in a second: it has to be imported and to compose the configuration. This reads the files of the
groups, and also offers commands, sweeps, and choices after a comma.
"""

import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_exp.commands.options import Command, Option
from attn_exp.core.conf import conf_folder, read_yaml

# `python -m attn_exp`, or a program's name; then the rest of the line.
_PROGRAM = re.compile(r"\s*(?:\S*python[\d.]*\s+-m\s+attn_exp\b|\S+)\s*(.*)", re.DOTALL)
_FLAGS = ("--help", "--version", "--hydra-help", "--multirun", "--config-dir", "--cfg", "--info")
# These take Hydra's groups and keys.
_OF_HYDRA = ("run", "duel", "backends", "bisect")
# A backend of a duel.
_RIVAL = re.compile(r"[a-z]")


def answer(line: str, commands: Collection[str]) -> list[str]:
    """Return what can stand in place of the last word of a command line, whole words in order."""
    match = _PROGRAM.fullmatch(line)
    rest = match[1] if match else ""
    words = rest.split()
    word = words.pop() if words and not rest[-1].isspace() else ""
    name = words[0] if words and words[0] in commands else None
    candidates = [*(() if words else commands), *_after(name, words[1:] if name else words, word)]
    return sorted({one for one in candidates if one.startswith(word) and one != word})


def _after(name: str | None, words: Sequence[str], word: str) -> Iterator[str]:
    """Words that can follow a command's name and words."""
    if name not in (None, "run"):
        command: Command = importlib.import_module(f"attn_exp.commands.{name}").COMMAND
        options = {option.name: option for option in command.options if not option.flag}
        key, equals, _ = word.partition("=")
        if equals and key in options:
            yield from _values(options[key], word, words)
            return
        yield from (f"{option}=" for option in options)
        if word.startswith("-"):
            yield from ("--help", *(option.shown.split()[0] for option in command.options if option.flag))
        if command.positional is not None and not equals:
            yield from _names(command.positional.name, word, _home(words))
    elif word.startswith("-"):
        yield from _FLAGS
    if name is None or name in _OF_HYDRA:
        yield from _overrides([conf_folder(), *_own(words)], words, word, rivals=name == "duel")


def _values(option: Option, word: str, words: Sequence[str]) -> Iterator[str]:
    key, _, typed = word.partition("=")
    if "sweeps" in option.complete or "baselines" in option.complete:
        home = _home(words)
        kept = _baselines(home) if "baselines" in option.complete else []
        there = _sweeps(home) if "sweeps" in option.complete else []
        yield from (f"{key}={name}" for name in _several([*kept, *there], typed))
    elif option.complete == "backends":
        yield from (f"{key}={name}" for name in _several(_choices([conf_folder(), *_own(words)], "backend"), typed))
    elif option.complete == "files" or option.name == "folder":
        yield from (f"{key}={path}" for path in _files(typed))
    else:
        yield from (f"{key}={choice}" for choice in option.choices)


def _names(place: str, word: str, home: Path) -> Iterator[str]:
    """Sweeps, or a sweep's jobs after its slash."""
    if place == "JOB_FOLDER":
        return
    if place == "NAME":
        from attn_exp.commands.reproduce import names_of_figures

        # The figures of a source once its slash is typed: there are hundreds.
        yield from (name for name in names_of_figures() if "/" in word or "/" not in name)
        return
    if place == "FOLDER":
        yield from (path for path in _files(word) if path.endswith("/"))
        return
    sweep, slash, _ = word.partition("/")
    if slash and place == "JOB_OR_SWEEP":
        yield from (f"{sweep}/{path.name}" for path in _folders(home / sweep))
    else:
        yield from _several(_sweeps(home), word)


def _overrides(folders: Sequence[Path], words: Sequence[str], word: str, *, rivals: bool) -> Iterator[str]:
    """Groups with their choices, and keys with their values, of the configuration in these folders."""
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, typed = word[len(sign) :].partition("=")
    if equals and rivals and _RIVAL.fullmatch(key):
        yield from (f"{key}={choice}" for choice in _choices(folders, "backend"))
    elif equals and (choices := _choices(folders, key)):
        yield from (f"{sign}{key}={choice}" for choice in _several(choices, typed))
    elif equals:
        yield from (f"{sign}{key}={value}" for value in _present(folders, words, key))
    else:
        yield from (f"{sign}{group}=" for group in _groups(folders, added=bool(sign)))
        yield from (f"{sign}{name}" for name in _keys(folders, words, key))


def _several(choices: Iterable[str], typed: str) -> list[str]:
    """The choices for the part behind the last comma, without those before it."""
    before, comma, _ = typed.rpartition(",")
    return [f"{before}{comma}{choice}" for choice in choices if choice not in before.split(",")]


def _groups(folders: Sequence[Path], *, added: bool) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.iterdir()):
            # A group that is not among the defaults is added with a plus sign.
            if path.is_dir() and path.name != "hydra" and (added or path.name in _defaults(folders[0])):
                yield path.name
    if not added:
        yield "hydra/launcher"


def _choices(folders: Sequence[Path], group: str) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")}) if group else []


def _keys(folders: Sequence[Path], words: Sequence[str], typed: str) -> Iterator[str]:
    node: Any = _tree(folders, words, typed.partition(".")[0])
    *groups, _ = typed.split(".")
    for group in groups:
        node = node.get(group) if isinstance(node, Mapping) else None
    if isinstance(node, Mapping):
        prefix = "".join(f"{group}." for group in groups)
        yield from (f"{prefix}{key}{'.' if isinstance(value, Mapping) else '='}" for key, value in node.items())


def _present(folders: Sequence[Path], words: Sequence[str], key: str) -> Iterator[str]:
    """The value that a key has, and both truth values where it is one."""
    node: Any = _tree(folders, words, key.partition(".")[0])
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if isinstance(node, bool) or (isinstance(node, str) and node.endswith(("true}", "false}"))):
        yield from ("true", "false")
    elif isinstance(node, (int, float)) or (isinstance(node, str) and "$" not in node and node):
        yield str(node)


def _tree(folders: Sequence[Path], words: Sequence[str], group: str) -> dict[str, Any]:
    """The top of the configuration, and in it one group as it is chosen."""
    top = {key: value for key, value in _yaml(folders[0] / "config.yaml").items() if key not in ("defaults", "hydra")}
    defaults = _defaults(folders[0])
    for name in defaults:
        top.setdefault(name, {})
    if group in defaults:
        chosen = next((word.partition("=")[2] for word in words if word.startswith(f"{group}=")), defaults[group])
        paths = [folder / group / f"{chosen.split(',')[0]}.yaml" for folder in folders]
        top[group] = next((_yaml(path) for path in paths if path.is_file()), {})
    return top


def _defaults(folder: Path) -> dict[str, str]:
    listed = _yaml(folder / "config.yaml").get("defaults", [])
    pairs = [one for one in listed if isinstance(one, Mapping)]
    return {str(key): str(value) for one in pairs for key, value in one.items() if not str(key).startswith("override")}


def _yaml(path: Path) -> dict[str, Any]:
    """Return a file of the configuration; empty if it cannot be read."""
    import msgspec

    try:
        return read_yaml(path)
    except (OSError, msgspec.DecodeError):
        return {}


def _own(words: Sequence[str]) -> list[Path]:
    """The folder of the user's own choices that the line names."""
    for flag, value in zip(words, (*words[1:], ""), strict=False):
        name, equals, behind = flag.partition("=")
        if name in ("--config-dir", "-cd") and Path(behind if equals else value).is_dir():
            return [Path(behind if equals else value)]
    return []


def _home(words: Sequence[str]) -> Path:
    return Path(next((word.partition("=")[2] for word in words if word.startswith("folder=")), "multirun"))


def _sweeps(home: Path) -> list[str]:
    from attn_exp.results.there import sweeps_in

    return sorted(path.name for path in sweeps_in(home))


def _baselines(home: Path) -> list[str]:
    from attn_exp.results.there import baselines_in

    return baselines_in(home)


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _files(typed: str) -> Iterator[str]:
    place, slash, _ = typed.rpartition("/")
    try:
        paths = sorted(Path(f"{place}{slash}" or ".").iterdir())
    except OSError:
        return
    yield from (f"{place}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in paths)
