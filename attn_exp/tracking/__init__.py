"""Trackers: where records are stored in addition to their folders. `tracker.name` selects one."""

from collections.abc import Mapping
from typing import Any

from attn_exp.core.errors import UserError, nearest
from attn_exp.tracking.base import SweepInfo, Tracker

__all__ = ["NAMES", "SweepInfo", "Tracker", "make_tracker"]

NAMES = ("mlflow", "none")


def make_tracker(config: Mapping[str, Any]) -> Tracker:
    """Return the tracker that a configuration's `tracker` selects. Raises UserError if there is no such place."""
    name = str(config.get("name", "none"))
    if name == "none":
        return Tracker()
    if name == "mlflow":
        from attn_exp.tracking.mlflow import MlflowTracker

        return MlflowTracker(config)
    raise UserError(f"tracker.name={name} is not a tracker: {nearest(name, NAMES)}choose one of {', '.join(NAMES)}")
