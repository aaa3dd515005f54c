"""Read the files of published figures (`published/*.yaml`); docs/reproducing.md describes them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from attn_exp.core.case import DTYPES, Case
from attn_exp.core.conf import published_folder
from attn_exp.core.errors import NOT_DECODED, UserError, brief, nearest
from attn_exp.core.files import read_whole
from attn_exp.core.flops import flops, flops_common_convention, flops_sdpa_convention
from attn_exp.core.hardware import Peak, datasheet_peak
from attn_exp.core.safe_text import printable_text

Counting = Literal["exact_mask", "common", "sdpa"]
Status = Literal["reproduced", "beside", "contradicted", "not_run", "cannot_run"]
# The FLOPs that a source divides by its times.
_FLOPS = {"exact_mask": flops, "common": flops_common_convention, "sdpa": flops_sdpa_convention}
# What of a case a figure's overrides set, and the fields that they set.
_CASE_KEYS = {
    "batch": ("batch",),
    "model.q_heads": ("q_heads",),
    "model.kv_heads": ("kv_heads",),
    "model.head_dim": ("head_dim",),
    "model.value_dim": ("value_dim",),
    "seq_len": ("q_len", "kv_len"),
    "q_len": ("q_len",),
    "kv_len": ("kv_len",),
    "causal": ("causal",),
    "align": ("align",),
    "window": ("window",),
    "layout": ("layout",),
    "dtype": ("dtype",),
}
# How it is measured; a record that was measured otherwise is no repetition under the same conditions.
CONDITIONS = ("layout", "regime", "l2")
_SETTINGS = ("regime", "l2", "deterministic")
_ID = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True)
class Source:
    """Where figures are from: its name (the file's), citation, hardware, and what its figures share.

    `counting` is the convention of its FLOPs, `reading` the relative error of figures read off a chart, `evidence` the
    file in results/ from which the statuses of its figures follow.
    """

    name: str
    title: str
    url: str
    place: str
    gpu: str
    counting: Counting
    reading: float
    note: str
    evidence: str

    @property
    def chip(self) -> Peak | None:
        """The datasheet of its GPU; None if that is unknown."""
        return datasheet_peak(self.gpu)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published figure.

    `overrides` are the words that compose its configuration on the command line, without the backend; `settings` are
    those that are no part of the case. `backend` runs its library; None if none does, and `why` says so. It has a rate
    in TFLOPS by the source's counting, a time in microseconds, or both.
    """

    source: Source
    id: str
    library: str
    version: str
    backend: str | None
    overrides: tuple[str, ...]
    case: Case
    settings: Mapping[str, str]
    direction: str
    tflops: float | None
    time_us: float | None
    status: Status
    why: str
    note: str

    @property
    def name(self) -> str:
        """The source's name and the figure's id."""
        return f"{self.source.name}/{self.id}"

    @property
    def deterministic(self) -> bool:
        """Whether it is of the deterministic algorithms."""
        return self.settings.get("deterministic") == "true"

    @property
    def counted(self) -> float:
        """The FLOPs of its pass as its source counts them."""
        return _FLOPS[self.source.counting](self.case, self.direction)

    @cached_property
    def us(self) -> float:
        """Its time in microseconds: that of its rate if it has one, which is rounded less."""
        if self.tflops is None:
            assert self.time_us is not None
            return self.time_us
        return self.counted / self.tflops / 1e6

    @property
    def value(self) -> tuple[float, str]:
        """The figure as published, and its unit."""
        if self.tflops is not None:
            return self.tflops, "TFLOPS"
        assert self.time_us is not None
        return self.time_us, "us"

    def words(self, *, passes: Sequence[str] = ()) -> list[str]:
        """Return the overrides with the backend, and with the passes unless they are the default ones."""
        backend = [f"backend={self.backend}"] if self.backend else []
        return [*backend, *self.overrides, *([f"passes=[{','.join(passes)}]"] if passes else [])]


class _Library(msgspec.Struct, forbid_unknown_fields=True):
    backend: str | None = None
    version: str = ""
    cannot_run: str = ""


class _Row(msgspec.Struct, forbid_unknown_fields=True, rename={"direction": "pass"}):
    id: str
    library: str
    direction: Literal["forward", "backward", "step"]
    overrides: str = ""
    tflops: float | None = None
    time_us: float | None = None
    # A number without a unit, which is refused by a sentence of its own.
    value: float | None = None
    status: Status | None = None
    why: str = ""
    note: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    url: str
    place: str
    gpu: str
    counting: Counting
    libraries: dict[str, _Library]
    figures: list[_Row]
    overrides: str = ""
    reading: float = 0.0
    note: str = ""
    evidence: str = ""


def read_published(folder: Path | None = None) -> list[Figure]:
    """Return all figures in a folder's files, by default the package's, in the order of the files' names.

    Raises:
        UserError: the folder has no such file, or one of its files is wrong.
    """
    folder = folder or published_folder()
    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    if not files:
        raise UserError(f"there are no figures in {folder}: it needs files such as published/NAME.yaml")
    return [figure for file in files for figure in read_file(file)]


def read_file(file: Path) -> list[Figure]:
    """Return the figures of one file. Raises UserError if the file cannot be read, or is wrong."""
    try:
        content = printable_text(read_whole(file).decode())
        data = msgspec.convert(msgspec.yaml.decode(content.encode()), _File)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (*NOT_DECODED, ValueError) as error:
        raise UserError(f"{file} is no file of published figures: {brief(' '.join(str(error).split()))}") from error
    if not 0 <= data.reading < 0.5:
        raise UserError(f"{file}: reading={data.reading} is no relative error, such as 0.01")
    source = Source(
        file.stem, data.title, data.url, data.place, data.gpu, data.counting, data.reading, data.note, data.evidence
    )
    figures, seen = [], set[str]()
    for row in data.figures:
        try:
            figures.append(_figure(source, data, row))
        except UserError as error:
            raise UserError(f"{file}: figure {row.id}: {error}") from error
        if row.id in seen:
            raise UserError(f"{file}: figure {row.id} is there twice: give each its own id")
        seen.add(row.id)
    return figures


def _figure(source: Source, data: _File, row: _Row) -> Figure:
    if not _ID.fullmatch(row.id):
        raise UserError("its id is not of lower-case letters, digits, '.', '_' and '-'")
    if row.tflops is None and row.time_us is None:
        raise UserError("it has no unit: write tflops=... or time_us=...")
    if row.value is not None:
        raise UserError("value= is without a unit: leave it out")
    for unit, number in (("tflops", row.tflops), ("time_us", row.time_us)):
        if number is not None and not 0 < number < math.inf:
            raise UserError(f"{unit}={number} is not a positive number")
    library = data.libraries.get(row.library)
    if library is None:
        raise UserError(f"its library {row.library} is not among libraries: {nearest(row.library, data.libraries)}")
    if (library.backend is None) == (not library.cannot_run):
        raise UserError(f"its library {row.library} needs either a backend or cannot_run")
    own = row.overrides.split()
    # The figure's own words take the place of the source's.
    words = {word.partition("=")[0]: word for word in (*data.overrides.split(), *own)}
    case, settings = _parsed(words)
    status: Status = row.status or ("cannot_run" if library.backend is None else "not_run")
    why = row.why or library.cannot_run
    if (status == "cannot_run") != bool(why):
        raise UserError("a figure has why= if and only if it is cannot_run")
    if status not in ("not_run", "cannot_run") and not source.evidence:
        raise UserError(f"its status {status} needs the source's evidence=")
    return Figure(
        source=source,
        id=row.id,
        library=row.library,
        version=library.version,
        backend=None if status == "cannot_run" else library.backend,
        overrides=tuple(words.values()),
        case=case,
        settings=settings,
        direction=row.direction,
        tflops=row.tflops,
        time_us=row.time_us,
        status=status,
        why=why,
        note=row.note,
    )


def _parsed(words: Mapping[str, str]) -> tuple[Case, dict[str, str]]:
    """Return the case that overrides compose to, and the settings among them."""
    fields: dict[str, Any] = {}
    settings: dict[str, str] = {}
    for key, word in words.items():
        text = word.partition("=")[2]
        if key in _SETTINGS:
            settings[key] = text
        elif key in _CASE_KEYS:
            fields |= dict.fromkeys(_CASE_KEYS[key], _value(key, text))
        else:
            near = nearest(key, [*_CASE_KEYS, *_SETTINGS])
            raise UserError(f"its override {word} is none that a figure may have: {near}see docs/reproducing.md")
    fields = {"kv_heads": fields.get("q_heads"), "value_dim": fields.get("head_dim")} | fields
    missing = [key for key, names in _CASE_KEYS.items() if key in _NEEDED and not set(names) <= set(fields)]
    if missing:
        raise UserError(f"its overrides lack {', '.join(missing)}")
    return Case(**fields), settings


_NEEDED = ("batch", "model.q_heads", "model.head_dim", "seq_len", "causal", "dtype")


def _value(key: str, text: str) -> Any:
    if key == "dtype":
        return DTYPES.get(text, text)
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def choose(figures: Sequence[Figure], name: str) -> list[Figure]:
    """Return the figures of a source, or the one that a name `source/id` or an unambiguous id means.

    Raises:
        UserError: there is none of that name. The message suggests the nearest.
    """
    chosen = [one for one in figures if one.source.name == name] or [one for one in figures if one.name == name]
    chosen = chosen or [one for one in figures if one.id == name]
    if len(chosen) > 1 and all(one.id == name for one in chosen):
        raise UserError(f"{name} is a figure of {', '.join(one.source.name for one in chosen)}: write SOURCE/{name}")
    if not chosen:
        sources = list(dict.fromkeys(one.source.name for one in figures))
        near = nearest(name, [*sources, *(one.name for one in figures), *(one.id for one in figures)])
        raise UserError(f"there is no figure or source '{name}': {near}the sources are {', '.join(sources)}")
    return chosen
