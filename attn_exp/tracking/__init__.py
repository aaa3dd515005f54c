"""Trackers: where records go besides their folders. Chosen by `tracker.name`, imported when asked for."""

from collections.abc import Mapping
from typing import Any

from attn_exp.core.errors import UserError, nearest
from attn_exp.tracking.base import SweepInfo, Tracker

__all__ = ["NAMES", "SweepInfo", "Tracker", "make_tracker"]

NAMES = ("mlflow", "none")


def make_tracker(config: Mapping[str, Any]) -> Tracker:
    """The tracker that a configuration's `tracker` asks for.

    Raises:
        UserError: a name that is no tracker's, or an MLflow location that cannot be meant.
    """
    name = str(config.get("name", "none"))
    if name == "none":
        from attn_exp.tracking.none import NoTracker

        return NoTracker()
    if name == "mlflow":
        from attn_exp.tracking.mlflow import MlflowTracker

        return MlflowTracker(config)
    raise UserError(f"tracker.name={name} is no tracker: {nearest(name, NAMES)}choose one of {', '.join(NAMES)}")
