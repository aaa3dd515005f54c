"""The versions to search, and an environment for each: packages from an index or a folder of wheels, git revisions."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attn_exp.core.errors import UserError, brief

_SPEC = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.!+-]+)")
_AVAILABLE = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_LIMIT_S = 3600


@dataclass(frozen=True)
class Environment:
    """The environment of one version: an interpreter, and further environment variables."""

    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)


class NotInstallable(Exception):
    """A version cannot be installed, built or measured; it is skipped. `good_end` says that it is the good end's."""

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

    def environment(self, index: int, folder: Path) -> Environment:
        """Install a version into a virtual environment that sees all other packages of this one.

        Raises:
            NotInstallable: pip refuses it.
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
        return Environment(str(python))


@dataclass(frozen=True)
class Revisions:
    """The commits of a checkout from the good to the bad one, each in a worktree of its own."""

    repo: Path
    names: tuple[str, ...]
    subjects: tuple[str, ...]
    build: tuple[str, ...]

    def label(self, index: int) -> str:
        """Return a commit with its subject."""
        return f"{self.names[index][:12]} {self.subjects[index]}".rstrip()

    def environment(self, index: int, folder: Path) -> Environment:
        """Check a commit out, and build it if there is a command for it.

        Raises:
            NotInstallable: the command fails.
        """
        home, done = folder / self.names[index][:12], folder / f"{self.names[index][:12]}.built"
        if not home.exists():
            git(self.repo, "worktree", "add", "--detach", "--force", str(home.resolve()), self.names[index])
        if self.build and not done.exists():
            _run(list(self.build), cwd=home)
            done.touch()
        places = [str(place.resolve()) for place in (home / "src", home) if place.is_dir()]
        return Environment(variables={"PYTHONPATH": os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])})

    def clear(self, folder: Path) -> None:
        """Remove the worktrees of this search."""
        for name in self.names:
            if (folder / name[:12]).exists():
                git(self.repo, "worktree", "remove", "--force", str((folder / name[:12]).resolve()))


def packages(good: str, bad: str, wheels: Path | None) -> Packages:
    """Return the versions between two ends `NAME==VERSION`, pre-releases included.

    Raises:
        UserError: an end is no version of the package, or they are in the wrong order.
    """
    ends = [_SPEC.fullmatch(end) for end in (good, bad)]
    if ends[0] is None or ends[1] is None:
        raise UserError(
            f"good={good} and bad={bad} are not of the form NAME==VERSION (or give repo=PATH for revisions)"
        )
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


def revisions(repo: Path, good: str, bad: str, build: str) -> Revisions:
    """Return the commits from one revision to another along the first parents.

    Raises:
        UserError: the folder is no checkout, a revision does not exist, or the good one is no ancestor of the bad one.
    """
    ends = []
    for end in (good, bad):
        try:
            ends.append(git(repo, "rev-parse", "--verify", "--quiet", f"{end}^{{commit}}").strip())
        except NotInstallable as error:
            raise UserError(f"{end} is no revision of {repo}: give two commits, tags or branches") from error
    lines = git(repo, "log", "--first-parent", "--reverse", "--format=%H %s", f"{ends[0]}..{ends[1]}").splitlines()
    base = git(repo, "log", "-1", "--format=%H %s", ends[0]).strip()
    listed = [base, *lines]
    if len(listed) < 2 or git(repo, "merge-base", *ends).strip() != ends[0]:
        raise UserError(f"good={good} is no ancestor of bad={bad} in {repo}: exchange them, or give two revisions")
    names, subjects = zip(*((line + " ").split(" ", 1) for line in listed), strict=True)
    return Revisions(repo, tuple(names), tuple(one.strip() for one in subjects), tuple(shlex.split(build)))


def git(repo: Path, *words: str) -> str:
    """Run git in a checkout and return what it prints. Raises NotInstallable if it fails."""
    return _run(["git", "-C", str(repo), *words])


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(brief(" ".join(str(error).split()))) from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines
        raise NotInstallable(brief(errors[0] if errors else f"{command[0]} exited with {done.returncode}"))
    return done.stdout
