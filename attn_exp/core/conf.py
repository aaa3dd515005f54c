"""The location of the configuration."""

from pathlib import Path


def conf_folder() -> Path:
    """Return the configuration's folder: in the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
