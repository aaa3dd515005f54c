"""The sweeps that a folder has, without reading them: what messages, examples and the TAB key offer."""

from pathlib import Path

from attn_exp.core.record_file import VERDICTS_NAME
from attn_exp.core.request import DUEL_NAME

HOME = "multirun"


def sweeps_in(home: Path) -> list[Path]:
    """Return the sweeps' folders, the oldest first. A duel without a verdict is none: it failed, or still runs."""
    try:
        folders = [path for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")]
        return sorted((path for path in folders if not _undecided_duel(path)), key=lambda path: path.stat().st_mtime)
    except (OSError, ValueError):
        return []


def _undecided_duel(folder: Path) -> bool:
    return (folder / DUEL_NAME).is_file() and not (folder / VERDICTS_NAME).is_file()
