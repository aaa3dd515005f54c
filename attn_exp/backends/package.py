"""Package: what a backend needs installed, and how a missing one is reported."""

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from attn_exp.core.errors import first_line


class Unavailable(Exception):
    """The backend's package or hardware is not there; the message says what would bring it."""


class Refused(Exception):
    """The backend finds out while it prepares that it cannot compute the case; the message says why."""


@dataclass(frozen=True)
class Package:
    """A distribution that a backend imports: its name for pip, the module, and the command that installs it."""

    distribution: str
    module: str
    install: str

    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def load(self) -> ModuleType:
        """Import the module.

        Raises:
            Unavailable: it is not installed, or does not fit what is; with the command that would bring it.
        """
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and self.module.split(".")[0] == error.name.split(".")[0]:
                raise Unavailable(f"{self.distribution} is not installed: {self.install}") from error
            raise Unavailable(f"{self.distribution} misses {error.name}: {self.install}") from error
        except Exception as error:  # a build for another torch or GPU fails in ways of its own while it is imported
            said = f"{self.distribution} {self.version()} cannot be imported here: {first_line(error)}"
            raise Unavailable(said) from error
