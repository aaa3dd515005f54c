"""Facts about backends and timers from conf/backend and conf/timer, read without importing either.

A backend's YAML has a mapping `about`, which describes the backend and does not reach its constructor: it is no part of
a job's identity. A timer's YAML names its class and the devices that it measures on.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import msgspec

from attn_exp.core.conf import choices
from attn_exp.core.errors import UserError

# Markers of matplotlib that are one character, as docs/adding_a_backend.md lists them.
MARKERS = ".,ov^<>12348spP*hH+xXDd|_"
# Okabe and Ito's colours, suitable for colour-blind readers; without their yellow, which is too faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A backend's `about`.

    Attributes:
        packages: distributions whose versions each record's environment has.
        colour: `#RRGGBB` in plots; derived from the name by default.
        marker: a matplotlib marker in plots; derived from the name by default.
        later: options that are younger than records of the backend: a request has one only if it is not false, null or
            0, as it is by default.
        function: whether it is a function of q, k and v that a model can call, as its class says by `a_function`.
    """

    packages: tuple[str, ...] = ()
    colour: str | None = None
    marker: str | None = None
    later: tuple[str, ...] = ()
    function: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerChoice:
    """A timer's YAML: its name in records, its class, and the devices (`cuda`, `cpu`) that it measures on."""

    name: str
    target: str
    devices: tuple[str, ...]


def read_about(about: Any) -> About:
    """Decode a backend's `about`. Raises UserError if it has a key or a value that does not fit."""
    if isinstance(about, dict) and (unknown := set(about) - {field.name for field in fields(About)}):
        known = ", ".join(field.name for field in fields(About))
        raise UserError(f"backend.about has the key {sorted(unknown)[0]}: its keys are {known}")
    try:
        read = msgspec.convert(about or {}, About)
    except msgspec.ValidationError as error:
        raise UserError(f"backend.about does not fit ({error})") from error
    if read.colour is not None and not re.fullmatch("#[0-9a-fA-F]{6}", read.colour):
        raise UserError(f'backend.about.colour={read.colour} is not of the form #RRGGBB: write colour: "#0072B2"')
    if read.marker is not None and (len(read.marker) != 1 or read.marker not in MARKERS):
        raise UserError(f"backend.about.marker={read.marker} is no marker: choose one of {' '.join(MARKERS)}")
    return read


def about_backend(name: str, own: Mapping[str, Any] | None = None) -> About:
    """Return what is known about a backend: from conf/backend, or for a backend from elsewhere from its `about`."""
    known = backends().get(name)
    return known if known is not None else read_about(own)


def recorded_about(name: str, own: Any) -> About:
    """Return what is known about a record's backend; the defaults if the record's `about` does not fit."""
    try:
        return about_backend(name, own)
    except UserError:
        return About()


def colour_of(name: str, about: About) -> str:
    """Return a backend's colour as `#RRGGBB`, its own or one that its name chooses: the same in every sweep."""
    return about.colour or _COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]


@cache
def backends() -> dict[str, About]:
    """Return the `about` of each backend that comes with the package, by name."""
    files = choices("backend").items()
    return {str(options.get("name", stem)): read_about(options.get("about")) for stem, options in files}


@cache
def backend_options() -> dict[str, frozenset[str]]:
    """Return the options that each of the package's backends declares in its YAML, by its `_target_`."""
    files = choices("backend").values()
    return {str(keys["_target_"]): frozenset(keys) - {"_target_", "name", "about"} for keys in files}


@cache
def later_options() -> dict[str, dict[str, Any]]:
    """Return the defaults of the options that are younger than records of the package's backends, by `_target_`."""
    files = choices("backend").values()
    return {str(keys["_target_"]): {name: keys[name] for name in read_about(keys.get("about")).later} for keys in files}


@cache
def packages() -> tuple[str, ...]:
    """Return the distributions that the package's backends use, sorted."""
    return tuple(sorted({package for about in backends().values() for package in about.packages}))


def input_kinds() -> tuple[str, ...]:
    """Return the kinds of inputs, `normal` and hard ones, by name."""
    return tuple(sorted(choices("inputs")))


@cache
def timers() -> dict[str, TimerChoice]:
    """Return the timers that come with the package, by name."""
    files = choices("timer").values()
    return {str(options["name"]): timer_choice(options) for options in files if "_target_" in options}


def timer_choice(options: Mapping[str, Any]) -> TimerChoice:
    """Return the timer that a `timer` node describes. Raises UserError if the node names no devices."""
    devices = options.get("devices")
    if not isinstance(devices, list) or not devices or not set(devices) <= {"cuda", "cpu"}:
        raise UserError(f"timer.devices={devices} is no list of devices: write devices: [cuda], [cpu] or [cuda, cpu]")
    return TimerChoice(name=str(options["name"]), target=str(options["_target_"]), devices=tuple(devices))


def timer_of(name: str, chosen: Mapping[str, Any]) -> TimerChoice:
    """Return a request's timer by its name in the records.

    The `timer` node of the configuration, `chosen`, describes one that does not come with the package. Raises
    ValueError if there is no such timer.
    """
    if name in timers():
        return timers()[name]
    if chosen.get("name") == name and "_target_" in chosen:
        return timer_choice(chosen)
    raise ValueError(f"there is no timer {name!r}")
