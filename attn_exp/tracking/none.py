"""The tracker that stores nothing: records stay in the sweep's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from attn_exp.core.record import Record
from attn_exp.tracking.base import Curve, EndStatus, Summary, SweepInfo


class NoTracker:
    """Every call returns at once."""

    def open(self, sweep: SweepInfo) -> str | None:
        """Do nothing."""
        return None

    def log(self, record: Record, folder: Path) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def note(self) -> str | None:
        """Return None: nothing is stored."""
        return None

    def look(self) -> str | None:
        """Return None: there is nothing to view."""
        return None

    def close(
        self,
        status: EndStatus,
        artifacts: Sequence[Path],
        *,
        summary: Summary | None = None,
        curves: Sequence[Curve] = (),
        of_jobs: Mapping[str, Sequence[Path]] = MappingProxyType({}),
        timeout_s: float | None = None,
    ) -> str | None:
        """Return None: nothing can fail."""
        return None
