"""Where the configuration lies."""

from pathlib import Path


def conf_folder() -> Path:
    """The folder of the configuration: in the installed package, else beside it in the checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
