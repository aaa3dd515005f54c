"""Read the files of published figures (`published/*.yaml`); docs/reproducing.md describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from attn_exp.core.case.case import DTYPES, HALVES, Case
from attn_exp.core.case.flops import flops, flops_common_convention, flops_sdpa_convention
from attn_exp.core.conf import published_folder
from attn_exp.core.errors import NOT_DECODED, UserError, brief, nearest
from attn_exp.core.files import read_whole
from attn_exp.core.host.hardware import Peak, datasheet_peak

Counting = Literal["exact_mask", "common", "sdpa"]
Status = Literal["reproduced", "beside", "faster_at_full_clock", "contradicted", "not_run", "cannot_run"]
# The FLOPs that a source divides by its times.
_FLOPS = {"exact_mask": flops, "common": flops_common_convention, "sdpa": flops_sdpa_convention}
# The keys of a case that a figure's overrides set, and the fields that they set.
_CASE_KEYS = {
    "batch": ("batch",),
    **{f"model.{name}": (name,) for name in ("q_heads", "kv_heads", "head_dim", "value_dim")},
    "seq_len": ("q_len", "kv_len"),
    **{name: (name,) for name in ("q_len", "kv_len", "causal", "align", "window", "layout", "dtype")},
}
_NEEDED = ("batch", "model.q_heads", "model.head_dim", "seq_len", "causal", "dtype")
# Keys that vary inside of one run: plain values, and no choices of a group.
_VARIED = ("batch", "model.q_heads", "model.kv_heads", "model.head_dim", "model.value_dim", "seq_len", "q_len",
           "kv_len", "causal", "window")  # fmt: skip
# Values of keys that a figure's overrides leave out, in runs for which other figures set them.
_DEFAULTS = {"window": "null", "model.value_dim": "null", "model.kv_heads": "null"}
# How it is measured; a record that was measured otherwise is no repetition under the same conditions.
CONDITIONS = ("layout", "regime", "l2")
_SETTINGS = ("regime", "l2", "deterministic")


_Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Library(msgspec.Struct, forbid_unknown_fields=True):
    backend: str | None = None
    version: str = ""
    cannot_run: str = ""


class _Row(msgspec.Struct, forbid_unknown_fields=True, rename={"direction": "pass"}):
    id: str
    library: str
    direction: Literal["forward", "backward", "step"]
    overrides: str = ""
    tflops: _Positive | None = None
    time_us: _Positive | None = None
    status: Status | None = None
    why: str = ""
    note: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    title: str
    url: str
    place: str
    gpu: str
    counting: Counting
    libraries: dict[str, _Library]
    figures: list[_Row]
    overrides: str = ""
    reading: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0
    note: str = ""
    evidence: str = ""


class Source(_File, kw_only=True):
    """The source of figures: its name (the file's), citation, hardware, and what its figures share.

    `counting` is the convention of its FLOPs, `reading` the relative error of figures read off a chart. `evidence` is
    the file in results/ from which the statuses of its figures follow.
    """

    name: str

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
        return self.us, "us"

    def words(self) -> list[str]:
        """Return the overrides with the backend."""
        return [*([f"backend={self.backend}"] if self.backend else []), *self.overrides]


def read_published(folder: Path | None = None) -> list[Figure]:
    """Return all figures in a folder's files, by default the package's, in the order of the files' names.

    Raises UserError if the folder has no such file, or one of its files is wrong.
    """
    folder = folder or published_folder()
    files = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    if not files:
        raise UserError(f"there are no figures in {folder}: it needs files such as published/NAME.yaml")
    return [figure for file in files for figure in read_file(file)]


def read_file(file: Path) -> list[Figure]:
    """Return the figures of one file. Raises UserError if the file cannot be read, or is wrong."""
    try:
        content = read_whole(file).decode()
        data = msgspec.convert(msgspec.yaml.decode(content.encode()), _File)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (*NOT_DECODED, ValueError) as error:
        raise UserError(f"{file} is no file of published figures: {brief(' '.join(str(error).split()))}") from error
    source = Source(name=file.stem, **msgspec.structs.asdict(data))
    figures, seen = [], set[str]()
    for row in source.figures:
        try:
            figures.append(_figure(source, row))
        except UserError as error:
            raise UserError(f"{file}: figure {row.id}: {error}") from error
        if row.id in seen:
            raise UserError(f"{file}: figure {row.id} is there twice: give each its own id")
        seen.add(row.id)
    return figures


def _figure(source: Source, row: _Row) -> Figure:
    if row.tflops is None and row.time_us is None:
        raise UserError("it has no unit: write tflops=... or time_us=...")
    library = source.libraries.get(row.library)
    if library is None:
        raise UserError(f"its library {row.library} is not among libraries: {nearest(row.library, source.libraries)}")
    # The figure's own words take the place of the source's.
    words = {word.partition("=")[0]: word for word in (*source.overrides.split(), *row.overrides.split())}
    case, settings = _parsed(words)
    status = row.status or ("cannot_run" if library.backend is None else "not_run")
    follows = {
        "backend": None if status == "cannot_run" else library.backend,
        "overrides": tuple(words.values()),
        "status": status,
        "why": row.why or library.cannot_run,
    }
    return Figure(source=source, case=case, settings=settings, **msgspec.structs.asdict(row) | follows)


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
            raise UserError(f"its override {word} is none that a figure may have: {near}")
    fields = {"kv_heads": fields.get("q_heads"), "value_dim": fields.get("head_dim")} | fields
    missing = [key for key in _NEEDED if not set(_CASE_KEYS[key]) <= set(fields)]
    if missing:
        raise UserError(f"its overrides lack {', '.join(missing)}")
    return Case(**fields), settings


def _value(key: str, text: str) -> Any:
    if key == "dtype":
        return DTYPES.get(text, text)
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def choose(figures: Sequence[Figure], name: str) -> list[Figure]:
    """Return the figures of a source, or the one that a name `source/id` or an unambiguous id means.

    Raises UserError if there is none of that name. The message suggests the nearest.
    """
    chosen = [figure for figure in figures if figure.source.name == name]
    chosen = chosen or [figure for figure in figures if figure.name == name]
    chosen = chosen or [figure for figure in figures if figure.id == name]
    if len(chosen) > 1 and all(figure.id == name for figure in chosen):
        sources = [figure.source.name for figure in chosen]
        raise UserError(f"{name} is a figure of {', '.join(sources)}: write SOURCE/{name}")
    if not chosen:
        sources = list(dict.fromkeys(figure.source.name for figure in figures))
        near = nearest(name, [*sources, *(figure.name for figure in figures), *(figure.id for figure in figures)])
        raise UserError(f"there is no figure or source '{name}': {near}the sources are {', '.join(sources)}")
    return chosen


def runs(figures: Sequence[Figure], more: Sequence[str], sweep: str) -> list[list[str]]:
    """Return the arguments of `attn-exp run` that measure each configuration once, all in one sweep.

    Configurations of one backend, dtype and settings that say the same sizes are one run, whose jobs vary in a node
    `figure` of its own. Each configuration has the passes that figures need; the backward needs its forward.
    """
    passes: dict[tuple[str, ...], set[str]] = {}
    for figure in figures:
        if figure.backend is not None:
            passes.setdefault(tuple(figure.words()), set()).add(figure.direction)
    groups: dict[tuple[tuple[str, ...], frozenset[str]], list[dict[str, str]]] = {}
    for words, directions in passes.items():
        split = dict(word.split("=", 1) for word in words)
        fixed = [f"{key}={value}" for key, value in split.items() if key not in _VARIED]
        if directions <= set(HALVES):
            directions = directions if directions == {"forward"} else set(HALVES)
        fixed.append(f"passes=[{','.join(sorted(directions, key=('forward', 'backward', 'step').index))}]")
        varied = _DEFAULTS | {key: value for key, value in split.items() if key in _VARIED}
        groups.setdefault((tuple(fixed), frozenset(varied)), []).append(varied)
    return [
        ["-m", *fixed, *_choices(configurations), *more, f"sweep={sweep}"]
        for (fixed, _), configurations in groups.items()
    ]


def _choices(configurations: Sequence[dict[str, str]]) -> list[str]:
    """Return the overrides of which each combination is one configuration."""
    keys = [key for key in _VARIED if any(key in choices for choices in configurations)]
    same = [key for key in keys if len({choices.get(key) for choices in configurations}) == 1]
    varied = [key for key in keys if key not in same]
    shared = [f"{key}={configurations[0][key]}" for key in same]
    if len(varied) < 2:
        return shared + [f"{key}={','.join(choices[key] for choices in configurations)}" for key in varied]
    names = {key: key.replace(".", "_") for key in varied}
    points = ["{" + ",".join(f"{names[key]}:{choices[key]}" for key in varied) + "}" for choices in configurations]
    return [*shared, f"+figure={','.join(points)}", *(f"{key}=${{figure.{names[key]}}}" for key in varied)]
