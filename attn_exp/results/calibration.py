"""Calibration: what `attn-exp doctor` measured on a device, stored for later runs."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.core.files import write_whole
from attn_exp.core.stats.paired import MARGIN_FLOOR


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The margin and ceilings of one device.

    `margin` is the smallest relative difference that is meaningful on the device. `ceilings` are FLOP/s of matrix
    products and bytes/s of copies, for information. `device` is from `device_key`.
    """

    device: str
    margin: float
    ceilings: dict[str, float] = field(default_factory=dict)


def device_key(environment: dict[str, Any]) -> str:
    """Return the key of a device's calibration: the GPU's UUID, or `cpu` and the processor's name."""
    return str(environment.get("gpu_uuid") or f"cpu {environment.get('cpu', '')}")


def calibration_path(device: str) -> Path:
    """Return the path of a device's calibration, in ATTN_EXP_STATE, else XDG_STATE_HOME, else ~/.local/state."""
    own = os.environ.get("ATTN_EXP_STATE")
    base = Path(own) if own else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "attn_exp"
    return base / f"calibration-{''.join(c if c.isalnum() else '-' for c in device)}.json"


def write_calibration(calibration: Calibration) -> Path:
    """Write a calibration and return its path. Raises OSError if that fails."""
    path = calibration_path(calibration.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1))
    return path


def read_calibration(device: str) -> Calibration | None:
    """Return the device's calibration, or None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode(calibration_path(device).read_bytes(), type=Calibration)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return None


def margin_for(device: str) -> float:
    """Return the smallest meaningful difference on the device; 1 % if the doctor has not measured it."""
    calibration = read_calibration(device)
    return max(MARGIN_FLOOR, calibration.margin) if calibration else MARGIN_FLOOR
