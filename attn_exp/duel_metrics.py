"""The numbers of a duel as trackers show them: those of each rival, and of each pair what was told of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from attn_exp.record import Record

_OF_A_PAIR = ("effect", "low", "high", "p")


def duel_metrics(records: Sequence[Record], verdicts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Numbers by name, from the records that were measured and the verdicts as `duel.json` has them, by pass."""
    found: dict[str, float] = {}
    for record in records:
        found |= {f"{record.request.label[0]}/{name}": value for name, value in record.metrics.items()}
    for direction, pairs in verdicts.items():
        for pair in pairs:
            who = f"{direction}/{pair['a'][0]}_{pair['b'][0]}"
            found |= {f"{who}/{name}": float(pair[name]) for name in _OF_A_PAIR}
    return found
