"""The version of the package, and the versions of PyTorch that it was tested with: no other one is refused."""

__version__ = "0.1.0"


TESTED = ("2.11", "2.13")


def untested_note(torch: str) -> str | None:
    """Return the line to print for a version of torch such as `2.15.0+cu130`, or None if its release was tested."""
    if ".".join(torch.split(".")[:2]) in TESTED:
        return None
    return f"torch {torch} is not a tested version (tested: {', '.join(TESTED)})"


def installed_note() -> str | None:
    """Return `untested_note` of the installed torch, read from its metadata: importing torch takes seconds."""
    # Not at the top: it takes a twentieth of the time of --help.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return untested_note(version("torch"))
    except PackageNotFoundError:
        return None
