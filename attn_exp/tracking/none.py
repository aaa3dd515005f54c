"""The tracker that does nothing: records stay in the sweep's folder alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from attn_exp.core.record import Record
from attn_exp.tracking.base import Curve, EndStatus, SweepInfo


class NoTracker:
    """Every call returns at once."""

    def open(self, sweep: SweepInfo) -> str | None:
        """Nothing to check."""
        return None

    def log(self, record: Record, folder: Path) -> None:
        """Nothing to queue."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def look(self) -> str | None:
        """Nothing to look at."""
        return None

    def close(
        self,
        status: EndStatus,
        artifacts: Sequence[Path],
        *,
        metrics: Mapping[str, float] | None = None,
        curves: Sequence[Curve] = (),
        of_jobs: Mapping[str, Sequence[Path]] = MappingProxyType({}),
        timeout_s: float | None = None,
    ) -> str | None:
        """Nothing to warn of."""
        return None
