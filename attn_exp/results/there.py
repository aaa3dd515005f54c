"""The sweeps that a folder has, without reading them: what messages, examples and the TAB key offer."""

import os
from pathlib import Path

from attn_exp.core.record.file import VERDICTS_NAME
from attn_exp.core.record.request import DUEL_NAME

HOME = "multirun"


def newest(what: str) -> str:
    """Return which sweeps there are, of a word that stands for one: `; the newest are monday, tuesday`."""
    names = [path.name for path in sweeps_in(Path(HOME))[-8:]] if what == "SWEEP" else []
    return f"; the newest are {', '.join(names)}" if names else ""


def baselines_of(home: Path) -> Path:
    """Return the folder of the baselines, which lies beside the folder of sweeps."""
    return Path(os.path.normpath(home / os.pardir / "baselines"))


def baselines_in(home: Path) -> list[str]:
    """Return the names of the baselines beside a folder of sweeps."""
    try:
        return sorted(one.name for one in baselines_of(home).iterdir() if one.is_dir() and one.name[0] != ".")
    except (OSError, ValueError):
        return []


def sweeps_in(home: Path) -> list[Path]:
    """Return the sweeps' folders, the oldest first. A duel without a verdict is none: it failed, or still runs."""
    try:
        folders = [path for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")]
        duels = [path for path in folders if (path / DUEL_NAME).is_file() and not (path / VERDICTS_NAME).is_file()]
        return sorted((path for path in folders if path not in duels), key=lambda path: path.stat().st_mtime)
    except (OSError, ValueError):
        return []
