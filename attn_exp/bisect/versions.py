"""The versions to search, from an index or a folder of wheels, and an environment for each."""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_exp.core.errors import UserError, brief

_SPEC = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.!+-]+)")
_AVAILABLE = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_LIMIT_S = 3600


class NotInstallable(Exception):
    """A version cannot be installed or measured; it is skipped. `good_end` says that it is the good end's."""

    good_end = False


@dataclass(frozen=True)
class Packages:
    """The versions of a package from the good to the bad one, from an index or a folder of wheels."""

    package: str
    names: tuple[str, ...]
    wheels: Path | None

    def label(self, index: int) -> str:
        """Return a version as pip takes it."""
        return f"{self.package}=={self.names[index]}"

    def environment(self, index: int, folder: Path) -> str:
        """Install a version into a virtual environment that sees all other packages of this one, and return its python.

        Raises NotInstallable if pip refuses it.
        """
        home = folder / f"{self.package}-{self.names[index]}"
        python = home / "bin" / "python"
        done = home / "installed"
        if not done.exists():
            _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
            # After the environment's own packages, with the .pth files in it: torch is not installed again.
            site = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
            places = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
            lines = [f"import site; site.addsitedir({place!r})" for place in places]
            (Path(site) / "zz_outer.pth").write_text("\n".join(lines) + "\n")
            where = ["--no-index", "--find-links", str(self.wheels)] if self.wheels is not None else []
            quiet = ["--quiet", "--disable-pip-version-check", "--pre"]
            _run([sys.executable, "-m", "pip", "--python", str(python), "install", *quiet, *where, self.label(index)])
            done.touch()
        return str(python)


def packages(good: str, bad: str, wheels: Path | None) -> Packages:
    """Return the versions between two ends `NAME==VERSION`, pre-releases included.

    Raises UserError if an end is no version of the package, or they are in the wrong order.
    """
    ends = [_SPEC.fullmatch(end) for end in (good, bad)]
    if ends[0] is None or ends[1] is None:
        raise UserError(f"good={good} and bad={bad} are not of the form NAME==VERSION")
    name = ends[0][1]
    if ends[1][1] != name:
        raise UserError(f"good= is of {name} and bad= of {ends[1][1]}: give two versions of one package")
    known = _of_folder(name, wheels) if wheels is not None else _of_index(name)
    from packaging.version import InvalidVersion, Version

    def parsed(text: str) -> "Version | None":
        try:
            return Version(text)
        except InvalidVersion:
            return None

    ordered = sorted({version for text in known if (version := parsed(text)) is not None})
    wanted = [parsed(end[2]) for end in ends if end]
    for end, version in zip((good, bad), wanted, strict=True):
        if version is None or version not in ordered:
            shown = ", ".join(map(str, ordered[-8:])) or "none"
            raise UserError(f"there is no {end} {f'in {wheels}' if wheels else 'on the index'}: the last are {shown}")
    first, last = (ordered.index(version) for version in wanted if version is not None)
    if first >= last:
        raise UserError(f"good={good} is not older than bad={bad}: exchange them, or give two versions")
    return Packages(name, tuple(map(str, ordered[first : last + 1])), wheels)


def _of_folder(name: str, wheels: Path) -> list[str]:
    if not wheels.is_dir():
        raise UserError(f"wheels={wheels} is no folder")
    wanted = re.sub(r"[-_.]+", "_", name).lower()
    parts = [path.name.split("-") for path in wheels.glob("*.whl")]
    return [part[1] for part in parts if len(part) >= 5 and re.sub(r"[-_.]+", "_", part[0]).lower() == wanted]


def _of_index(name: str) -> list[str]:
    try:
        listed = _run([sys.executable, "-m", "pip", "index", "versions", "--pre", "--disable-pip-version-check", name])
    except NotInstallable as error:
        raise UserError(f"pip cannot list the versions of {name}: {error}") from error
    match = _AVAILABLE.search(listed)
    return match[1].split(", ") if match else []


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(brief(" ".join(str(error).split()))) from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines
        raise NotInstallable(brief(errors[0] if errors else f"{command[0]} exited with {done.returncode}"))
    return done.stdout
