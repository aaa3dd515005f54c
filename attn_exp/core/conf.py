"""The location of the configuration and of the published figures, and their files."""

from functools import cache
from pathlib import Path
from typing import Any


def conf_folder() -> Path:
    """Return the configuration's folder: in the installed package, or next to it in a checkout."""
    return _data_folder("conf")


def published_folder() -> Path:
    """Return the folder of published figures: in the installed package, or next to it in a checkout."""
    return _data_folder("published")


def _data_folder(name: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def choice(group: str, name: str) -> dict[str, Any]:
    """Return a choice of one of the configuration's groups; empty if there is none of that name.

    `name` may be a record's or typed: it is compared with the names of files, and never part of a path.
    """
    return choices(group).get(name, {})


@cache
def choices(group: str) -> dict[str, dict[str, Any]]:
    """Return all choices of one of the configuration's groups, by name; as from `read_yaml`, nobody changes them."""
    return {path.stem: read_yaml(path) for path in sorted((conf_folder() / group).glob("*.yaml"))}


@cache
def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of the configuration once; every caller gets the same dictionary and must not change it.

    Raises OSError if the file cannot be read, and msgspec.DecodeError if it is no YAML, or no mapping at its top
    (msgspec.ValidationError).
    """
    # Imported here because `--help` of a command reads no YAML. msgspec uses libyaml if it is installed, which is ten
    # times as fast as Python's own parser. Some forty files are read at every start.
    import msgspec

    read: dict[str, Any] = msgspec.convert(msgspec.yaml.decode(path.read_bytes()) or {}, dict[str, Any])
    return read
