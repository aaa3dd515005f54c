"""Read the requests in a folder: of one job, or of the rivals of a duel."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from attn_exp.core.errors import UserError
from attn_exp.core.record import (
    DUEL_NAME,
    NOT_DECODED,
    REQUEST_NAME,
    RecordError,
    Request,
)

if TYPE_CHECKING:
    pass


_Decoded = TypeVar("_Decoded")


def read_requests(folder: Path) -> list[tuple[Request, Path]]:
    """Return a folder's request, or a duel's several, each with the folder for its record.

    Raises:
        RecordError: the file is no request. The message names it.
    """
    duel = folder / DUEL_NAME
    if duel.exists():
        requests = _decoded(duel, list[Request])
        return [(request, folder / request.job) for request in requests]
    return [(_decoded(folder / REQUEST_NAME, Request), folder)]


def _decoded(path: Path, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=kind)
    except (*NOT_DECODED, UserError) as error:
        raise RecordError(f"{path} is not a request: {' '.join(str(error).split())}") from error
