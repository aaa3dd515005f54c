"""Names: what may name a folder or file inside another, and paths that must not lead out of one."""

import re
from pathlib import Path
from typing import Any

from attn_exp.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


def check_name(key: str, name: Any) -> None:
    """Raise UserError unless `name` can name a folder inside another, and nothing outside of it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{key}={name} cannot name a folder: use letters, digits, '.', '_' and '-'")


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, lies in a folder."""
    return path.resolve().is_relative_to(folder.resolve())
