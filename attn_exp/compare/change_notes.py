"""What a reader should know about a sweep against an earlier one, in sentences."""

from collections import Counter
from collections.abc import Sequence

from attn_exp.compare.canary import Session
from attn_exp.compare.cell import Metric
from attn_exp.compare.change import Change
from attn_exp.compare.environment import Difference


def refused_notes(unlike: Sequence[Difference]) -> list[str]:
    """What would have been refused, had it not been told otherwise."""
    return [f"compared all the same (anyway=true): {one}, in {one.cells} cells" for one in unlike]


def session_notes(rows: Sequence[Change], metric: Metric) -> list[str]:
    """What was divided out, by which canaries, and what was not."""
    if not metric.follows_clock:
        return []
    found: dict[tuple[str, ...], list[Session]] = {}
    without = 0
    for row in rows:
        if row.session is not None:
            found.setdefault(row.session.names, []).append(row.session)
        elif row.change is not None:
            without += 1
    said = []
    for names, sessions in found.items():
        low, high = (100 * (pick(one.factor for one in sessions) - 1) for pick in (min, max))
        factor = f"{low:+.2f} %" if high - low < 0.005 else f"{low:+.2f} to {high:+.2f} %"
        scatter = 100 * max(one.scatter for one in sessions)
        said.append(
            f"canaries {' and '.join(names)}: time {factor} in the new session, divided out of {len(sessions)} cells "
            f"(they scatter by {scatter:.2f} %)"
        )
    if without:
        said.append(
            f"{without} cells have no canary in both sweeps: what lies between the sessions is still in their change, "
            "and in what is taken for no difference"
        )
    return said


def kernel_notes(rows: Sequence[Change]) -> list[str]:
    """The kernels that took the place of others, the most frequent first."""
    found = Counter(names for row in rows if (names := row.other_kernel) is not None)
    return [
        f"another kernel ran in {count} cells: {_cut(old)} -> {_cut(new)}" for (old, new), count in found.most_common(3)
    ]


def _cut(name: str) -> str:
    name = name.split("(")[0]
    return name if len(name) <= 60 else f"{name[:57]}..."
