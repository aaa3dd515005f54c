"""Whether this process has loaded the source that a job asks for: an imported module stays as its file was then."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from attn_exp.core.record.request import Request
from attn_exp.core.source import Source, described, identity, short, source_of
from attn_exp.worker.attempt import Stopped

# The files of the backends that this process has loaded, and their hashes at that time.
_loaded: dict[Path, str] = {}


def with_present_source(request: Request) -> Request:
    """Return the request for the backend as it is now, for a job that is measured again by hand."""
    return replace(request, source=described(str(request.backend["_target_"])))


def is_outdated(requests: Iterable[Request]) -> bool:
    """Return whether a file of these jobs' backends was written after this process loaded it."""
    return any(_differing(source_of(str(request.backend["_target_"]))) for request in requests)


def check_source(request: Request) -> None:
    """Note the source of the backend that was just loaded, and compare it with the request's.

    Raises Stopped if it is another one.
    """
    found = source_of(str(request.backend["_target_"]))
    if found is None:
        return
    if differing := _differing(found):
        raise Stopped("error", f"{differing[0].name} was changed after this process had loaded it: start again")
    _loaded.update(found.files)
    # A request that was written by hand names no source.
    if request.source and identity(found.facts) != identity(request.source):
        change = f"from {short(request.source)} to {short(found.facts)}"
        raise Stopped("error", f"the source of {request.backend['name']} was changed {change} before it was loaded")


def _differing(found: Source | None) -> list[Path]:
    files = found.files if found is not None else {}
    return [path for path, sha256 in files.items() if _loaded.get(path, sha256) != sha256]
