"""Options as dataclasses: each is a field, from which come its default, how its text is read, and its help."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from attn_exp.core.errors import UserError, no_config_dir
from attn_exp.core.values import Reader, names, one_of, path, text, truth

_READERS: Mapping[Any, Reader] = {
    str: text, str | None: text, bool: truth, tuple[str, ...]: names, Path: path, Path | None: path,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed behind a command. Each command has a class of its own, whose docstring is in its help.

    `overrides` are the words for Hydra, `command` are all words as they were typed.
    """

    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of an option: what `option` was given, and its field's name and type."""

    about: str
    value: str
    default: str
    read: Reader | None
    flag: bool = False
    short: str = ""
    bare: bool = False
    example: str = ""
    field: str = ""
    kind: Any = str

    @property
    def name(self) -> str:
        """The option as it is typed. A name that Python has for itself ends with a `_` as a field."""
        return self.field.rstrip("_")

    @property
    def shown(self) -> str:
        """The option as the help writes it."""
        if self.example:
            return self.value
        return f"--{self.name.replace('_', '-')} {self.value}" if self.flag else f"{self.name}={self.value}"

    @property
    def several(self) -> bool:
        """Whether its value is a list."""
        return get_origin(self.kind) is tuple

    @property
    def needed(self) -> bool:
        """Whether it may not be left out."""
        return type(None) not in get_args(self.kind)

    def parse(self, value: Any) -> Any:
        """Return the value of a text. Raises UserError if it cannot be meant."""
        read = self.read or (one_of(get_args(self.kind)) if get_origin(self.kind) is Literal else _READERS[self.kind])
        return read(self.name, value)


def option(
    about: str, value: str = "true", *, default: Any = None, shown: str = "", read: Reader | None = None, **more: Any
) -> Any:
    """Return the field of an option, whose type says how its text is read.

    Args:
        about: what it does, as the help says it.
        value: what stands for its value in the help. With `true`, it is false where it is not given.
        default: its value where it is not given; text, if `read` is to read it.
        shown: what the help says of the default, if it is not that value.
        read: reads its text, if the type does not say how.
        **more: `flag`: it is written `--name VALUE`, as Hydra's flags are; `short`: another flag for it; `bare`: it may
            be written without `=true`; `example`: it has no name, and this is a command with it.
    """
    default = False if value == "true" else default
    said = shown or ("" if default is None or default == () else str(default).replace("False", "false"))
    real = read(value, default) if read is not None and isinstance(default, str) else default
    return field(default=real, metadata={"option": Option(about=about, value=value, default=said, read=read, **more)})


def declared(options: type[Options]) -> list[Option]:
    """Return the options of a class in their order."""
    own = [(one, one.metadata["option"]) for one in fields(options) if "option" in one.metadata]
    return [replace(option, field=one.name, kind=one.type) for one, option in own]


def _config_dir(key: str, value: str) -> Path:
    if not value or not Path(value).is_dir():
        raise UserError(no_config_dir(value or "''"))
    return Path(value).absolute()


# The fields of several commands; each call makes one.
sweeps_option = partial(
    option, "a sweep's name in folder=, a pattern ('nightly-*') or a path; several with commas or spaces", "SWEEP",
    default=(),
)  # fmt: skip
folder_option = partial(option, "the folder that sweeps are in", "FOLDER", default=Path("multirun"))
device_option = partial(option, "auto, cpu, cuda, or cuda:1 for one GPU of several", "DEVICE", default="auto")
uri_option = partial(
    option, "the MLflow store to read from: uri=sqlite:///mlruns/mlflow.db, or a server: uri=http://127.0.0.1:5000",
    "URI", shown="folders",
)  # fmt: skip
config_dir_option = partial(
    option, "a folder with choices of your own: backend/, model/, tracker/ ...", "FOLDER",
    read=_config_dir, flag=True, short="-cd",
)  # fmt: skip
