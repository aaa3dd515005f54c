"""Names: what may name a folder or file inside another, and paths that must not lead out of one."""

import re
from pathlib import Path
from typing import Any

from attn_exp.errors import UserError

_LONGEST = 101
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(key: str, name: Any) -> None:
    """Raise UserError unless `name` can name a folder inside another, and nothing outside of it."""
    if isinstance(name, str) and len(name) > _LONGEST:
        raise UserError(f"{key}={name[:20]}... has {len(name)} characters: use at most {_LONGEST}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{key}={name} cannot name a folder: begin with a letter or digit, and use those, '.', '_' and '-'"
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, lies in a folder."""
    return path.resolve().is_relative_to(folder.resolve())
