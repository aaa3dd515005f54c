"""Calibration: what `attn-exp doctor` found of a machine, kept where later runs find it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.paired_test import MARGIN_FLOOR
from attn_exp.core.record import write_whole


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One device's A/A spread and ceilings.

    `margin` is the smallest relative difference that means something here, from so many `comparisons`; `ceilings` are
    FLOP/s of matrix products and copied bytes/s, for people to read. `device` is what `device_key` makes.
    """

    device: str
    margin: float
    ceilings: dict[str, float] = field(default_factory=dict)
    measured_at: float = 0.0
    comparisons: int = 0


def device_key(environment: dict[str, Any]) -> str:
    """What a calibration is kept under: the GPU's UUID, or `cpu` with the processor's name."""
    return str(environment.get("gpu_uuid") or f"cpu {environment.get('cpu', '')}")


def calibration_path(device: str) -> Path:
    """Where a device's calibration is kept: ATTN_EXP_STATE, else XDG_STATE_HOME, else ~/.local/state."""
    own = os.environ.get("ATTN_EXP_STATE")
    base = Path(own) if own else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "attn_exp"
    return base / f"calibration-{''.join(c if c.isalnum() else '-' for c in device)}.json"


def write_calibration(found: Calibration) -> Path:
    """Keep a calibration; where it was written. Raises OSError if it cannot be."""
    path = calibration_path(found.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(found), indent=1))
    return path


def read_calibration(device: str) -> Calibration | None:
    """The device's calibration; None if there is none, or none that can be read."""
    try:
        tree = msgspec.json.decode(calibration_path(device).read_bytes(), type=dict[str, Any])
        # Its name in files of earlier versions.
        tree.setdefault("margin", tree.get("delta"))
        return msgspec.convert(tree, Calibration)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return None


def margin_for(device: str) -> float:
    """The smallest difference that means something on the device; 1 % if the doctor has not seen it."""
    found = read_calibration(device)
    return max(MARGIN_FLOOR, found.margin) if found else MARGIN_FLOOR
