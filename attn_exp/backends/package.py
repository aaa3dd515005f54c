"""The package that a backend needs, and how a missing one is reported."""

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from attn_exp.core.errors import first_line


class Unavailable(Exception):
    """The backend's package or hardware is missing; the message says what to install or set."""


class WrongOption(TypeError):
    """An option of a backend or a profiler has a value that it does not take; the message says which it takes."""


class Refused(Exception):
    """The backend cannot compute the case, which only its preparation could tell; the message says why."""


@dataclass(frozen=True)
class Package:
    """A distribution that a backend imports: its name for pip, its module, and the command that installs it."""

    distribution: str
    module: str
    install: str

    def version(self) -> str | None:
        """Return the installed version; None if it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def load(self) -> ModuleType:
        """Import the module.

        Raises Unavailable if it is not installed, or does not fit the installed torch or GPU; the message has the
        install command.
        """
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and self.module.split(".")[0] == error.name.split(".")[0]:
                raise Unavailable(f"{self.distribution} is not installed: {self.install}") from error
            raise Unavailable(f"{self.distribution} misses {error.name}: {self.install}") from error
        except Exception as error:  # a build for another torch or GPU may raise anything when it is imported
            message = f"{self.distribution} {self.version()} cannot be imported here: {first_line(error)}"
            raise Unavailable(message) from error
