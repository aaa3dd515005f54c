"""What a decoded record must also be, so that everything that reads records can rely on it.

A record may be somebody else's, damaged, or of a changed program. Types are checked when it is decoded; here are the
ranges of its numbers, the forms of its names, and what has to fit together. Readers of a record take it as it is
afterwards: nothing else checks.
"""

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from attn_exp.core.case import PASSES
from attn_exp.core.errors import LONGEST_WORD, odd_word
from attn_exp.core.request import Measuring
from attn_exp.core.status import Status
from attn_exp.core.text import flat

# Beyond these, ratios and products of a few numbers are no numbers any more. Nothing that is measured comes near.
_LARGEST, _LEAST = 1e100, 1e-100
# A picosecond and four months, and the end of the year 9999 in seconds since 1970.
_SHORTEST_US, _LONGEST_US, _LAST_MOMENT = 1e-6, 1e13, 253402300799.0
# Two rounds that differ leave an interval of any width.
_FREE = ("_low_us", "_high_us", "half_width", ".low", ".high")
_MOMENTS = ("_at", ".blocks")
_NEVER_NEGATIVE = ("power_error", "/rounds", "half_width", *_MOMENTS)
# Below every limit.
_USUAL = 1e11
_LONGEST_TEXT = 20_000
_MOST_NAMES, _MOST_ROUNDS = 2000, _USUAL
_ROUNDED = 1 + 1e-9

_Word = Annotated[str, Meta(max_length=LONGEST_WORD)]
_Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Number = Annotated[float, Meta(ge=0, le=_LARGEST)]
# `0-3,8`; six digits, since what reads it lists the numbers.
_Numbers = Annotated[str, Meta(pattern=r"^(\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?){0,999})?$")]


class Facts(msgspec.Struct, gc=False):
    """The entries of `environment` that are read, with their types. None and an absent entry are unknown."""

    host: _Word | None = None
    platform: _Word | None = None
    python: _Word | None = None
    cpu: _Word | None = None
    cpu_threads: _Count | None = None
    cpu_capability: _Word | None = None
    cpu_instruction_sets: _Text | None = None
    cpu_affinity: _Numbers | None = None
    cpu_governor: _Word | None = None
    numa_nodes: _Numbers | None = None
    matmul_precision: _Word | None = None
    versions: dict[_Word, _Word] = {}
    variables: dict[_Word, _Text] = {}
    git_commit: _Word | None = None
    gpu: _Word | None = None
    gpu_uuid: _Word | None = None
    gpu_memory_bytes: _Count | None = None
    gpu_numa_node: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    multiprocessors: _Count | None = None
    l2_bytes: _Count | None = None
    compute_capability: _Word | None = None
    cuda: _Word | None = None
    cudnn: _Count | _Word | None = None
    driver: _Word | None = None
    power_limit_w: _Number | None = None
    max_sm_clock_mhz: _Number | None = None
    max_memory_clock_mhz: _Number | None = None
    event_floor_us: _Number | None = None
    event_quantum_us: _Number | None = None
    ecc: bool | None = None
    mig: bool | None = None
    matmul_tf32: bool | None = None
    cudnn_tf32: bool | None = None
    bf16_reduced_precision_reduction: bool | None = None
    fp16_reduced_precision_reduction: bool | None = None
    gradients_enabled: bool | None = None
    changed_settings: dict[_Word, _Text] = {}
    inputs: _Text | None = None
    nvml: _Text | None = None


def check_environment(environment: Mapping[str, Any]) -> None:
    """Check the environment of a record. Raises msgspec.ValidationError with the entry and what it should be."""
    msgspec.convert(environment, Facts)


def unsound(
    *,
    status: Status,
    names: Mapping[str, str | None],
    backend: Mapping[str, Any],
    measuring: Measuring,
    passes: Mapping[str, Any],
    metrics: Mapping[str, float],
    flags: Iterable[str],
    parts: Mapping[str, Any],
) -> str | None:
    """Return why a decoded record cannot be one although each of its fields has the right type, or None.

    Args:
        status: the record's.
        names: words of the record that stand in tables, by their place; None is unknown.
        backend: the request's backend, with its options.
        measuring: the request's options of measuring.
        passes: what it has of each pass, with `disagreements`.
        metrics: its metrics.
        flags: its flags.
        parts: the other parts of the record, by their place.
    """
    name = backend.get("name")
    if not isinstance(name, str):
        return "its backend has no name"
    places = {**names, "backend.name": name, "timer.name": measuring.timer, "l2": measuring.l2}
    places |= {"inputs": measuring.inputs, **{f"flags[{at}]": flag for at, flag in enumerate(flags)}}
    named = (f"{place} {odd}" for place, name in places.items() if name is not None and (odd := odd_word(name)))
    return (
        (next(named, None) if _odd_names((*places.values(),)) else None)
        or _odd_passes(measuring.passes, passes)
        or _odd_options(backend)
        or _odd_number("metrics", metrics)
        or next((odd for place, part in parts.items() if (odd := unsound_part(place, part))), None)
        or (_odd_times(measuring.passes, metrics) if status == "ok" else None)
    )


def unsound_part(place: str, part: Any) -> str | None:
    """Return why a part of a record cannot be one, or None. `place` is where it stands: `profiles.torch`."""
    return _odd_number(place, part)


def _odd_passes(asked: Sequence[str], found: Mapping[str, Any]) -> str | None:
    for name in (*asked, *found):
        if name not in PASSES:
            return f"it has a pass {name[:LONGEST_WORD]!r}"
    for name, measured in found.items():
        if not all(pair.one_us > 0 and pair.other_us > 0 for pair in measured.disagreements):
            return f"two timers of {name} disagree about no time"
    return None if asked and len(set(asked)) == len(asked) else "its passes are none, or one twice"


def _odd_options(backend: Mapping[str, Any]) -> str | None:
    options = flat(backend)
    if len(options) > _MOST_NAMES:
        return f"its backend has {len(options):,} options"
    return next((f"an option of its backend {odd}" for name in options if (odd := odd_word(name))), None)


def _odd_times(passes: Sequence[str], metrics: Mapping[str, float]) -> str | None:
    for name in passes:
        time = metrics.get(f"{name}/time_us", 0.0)
        if not time > 0:
            return f"it is ok without a time of {name}"
        low, high = (metrics.get(f"{name}/time_{bound}_us", time) for bound in ("low", "high"))
        if not low <= time * _ROUNDED or not time <= high * _ROUNDED:
            return f"{name}/time_us={time:g} is outside of its own interval, {low:g} to {high:g}"
    return None


def _odd_number(place: str, value: Any) -> str | None:
    """Return the place of a number that cannot have been measured, or of a name that is none; None if all can."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, float | int):
        if _SHORTEST_US <= value <= _USUAL or value == 0:
            return None
        least, largest = _LEAST, _LARGEST
        if place.endswith(("/time_us", ".times_us")):
            least, largest = _SHORTEST_US, _LONGEST_US
        elif place.endswith(_MOMENTS):
            largest = _LAST_MOMENT
        elif place.endswith(_FREE):
            least, largest = 0.0, sys.float_info.max
        elif place.endswith("/rounds"):
            largest = _MOST_ROUNDS
        lowest = 0.0 if place.endswith(_NEVER_NEGATIVE) else -largest
        if not lowest <= value <= largest or 0 < abs(value) < least:
            return f"{place}={f'{value:g}' if isinstance(value, float) else 'a number'} is no possible value"
        return None
    if isinstance(value, str):
        return f"{place} has {len(value):,} characters" if len(value) > _LONGEST_TEXT else None
    if isinstance(value, dict):
        if len(value) > _MOST_NAMES:
            return f"{place} has {len(value):,} entries"
        # Reasons of the compiler are names there, and a backend's own words.
        if not place.endswith((".breaks", "notes")) and (odd := _odd_names((*value,))):
            return f"a name in {place} {odd}"
        return None if all(map(_usual, value.values())) else _odd_within(place, value.items())
    if isinstance(value, tuple | list):
        return None if all(map(_usual, value)) else next(filter(None, (_odd_number(place, one) for one in value)), None)
    return _odd_within(place, ((name, getattr(value, name)) for name in _fields_of(value.__class__)))


@cache
def _fields_of(kind: Hashable) -> tuple[str, ...]:
    """Return the fields of a dataclass or of one of msgspec's structures; none of anything else."""
    return tuple(one.name for one in fields(kind)) if is_dataclass(kind) else getattr(kind, "__struct_fields__", ())


def _odd_within(place: str, several: Iterable[tuple[str, Any]]) -> str | None:
    for name, one in several:
        if not _usual(one) and (odd := _odd_number(f"{place}.{name}", one)):
            return odd
    return None


def _usual(one: Any) -> bool:
    """Return whether something is possible everywhere: most of a record are usual numbers, texts and empty entries."""
    if one.__class__ is float:
        return _SHORTEST_US <= one <= _USUAL or one == 0.0
    return len(one) <= _LONGEST_TEXT if one.__class__ is str else not one


# Thousands of records have the same names.
@lru_cache(256)
def _odd_names(names: tuple[str | None, ...]) -> str | None:
    """Return what is wrong with the first name that cannot be one, or None."""
    return next(filter(None, (odd_word(name) for name in names if name is not None)), None)
