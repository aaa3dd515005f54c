"""A home directory for users that have none, as in a container started with `docker run --user 12345`."""

import os
import tempfile
from pathlib import Path


def provide_home() -> None:
    """Set HOME to a private folder of this user's where neither HOME nor the user database names one.

    MLflow and Matplotlib cannot be imported otherwise.
    """
    try:
        Path.home()
    except RuntimeError:
        folder = Path(tempfile.gettempdir(), f"attn_exp-home-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix="attn_exp-home-"))
        os.environ["HOME"] = str(folder)
