"""python bench/judge_cost.py BEFORE_FOLDER AFTER_FOLDER OUT.md: what judging costs, and which times a method moved.

Reads the records that two versions of the method left of one sweep. Writes the seconds of each stage, judging's share
of the jobs whose passes all take more than 0.2 ms, and the ratios of the times.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from attn_exp.core.text import grid

# Above this a pass is long: there judging must not take more than a quarter of a job's measuring.
LONG_US = 200.0
# What measures a job; start-up, the machine's ceilings and the making of inputs are not of one backend.
MEASURING = ("first_call", "kernels", "timing", "second_opinions", "accuracy")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Records by case and backend. Identities of two methods may differ, labels do not."""
    records = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*/record.json"))]
    return {record["request"]["label"]: record for record in records}


def seconds(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of each stage, over all jobs."""
    stages = sorted({stage for record in records.values() for stage in record["stages_s"]})
    return {stage: sum(record["stages_s"].get(stage, 0.0) for record in records.values()) for stage in stages}


def times(record: dict[str, Any]) -> dict[str, float]:
    """Median times by pass."""
    return {
        name: record["metrics"][name]
        for name in record["metrics"]
        if name.endswith("/time_us") and name.count("/") == 1
    }


def shares(records: dict[str, dict[str, Any]]) -> list[float]:
    """Judging's share of the measuring, for each job whose passes are long."""
    found = []
    for record in records.values():
        if record["status"] == "ok" and min(times(record).values()) > LONG_US:
            stages = record["stages_s"]
            found.append(stages["accuracy"] / sum(stages.get(name, 0.0) for name in MEASURING))
    return found


def main(before: Path, after: Path, out: Path) -> None:
    """Compare two sweeps."""
    both = {"before": read(before), "after": read(after)}
    lines = []
    for name, records in both.items():
        span = max(one["finished_at"] for one in records.values()) - min(one["started_at"] for one in records.values())
        method = {one["method_version"] for one in records.values()}
        statuses = sorted(one["status"] for one in records.values())
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        lines.append(
            f"{name}: method_version {', '.join(sorted(method))}, {counts}, {span:.1f} s from first to last job"
        )
    of = {name: seconds(records) for name, records in both.items()}
    rows = [
        {
            "stage": stage,
            "before s": f"{of['before'].get(stage, 0.0):.2f}",
            "after s": f"{of['after'].get(stage, 0.0):.2f}",
        }
        for stage in sorted(of["before"] | of["after"])
    ]
    lines += ["", grid(rows, list(rows[0])), ""]
    for name, records in both.items():
        found = shares(records)
        if found:
            middle, most = statistics.median(found), max(found)
            lines.append(f"judging's share, {name}: median {middle:.0%}, largest {most:.0%} of {len(found)} long jobs")
    for direction in ("forward", "backward"):
        ratios = [
            times(both["after"][label])[f"{direction}/time_us"] / times(record)[f"{direction}/time_us"]
            for label, record in both["before"].items()
            if record["status"] == both["after"].get(label, record)["status"] == "ok" and label in both["after"]
        ]
        if ratios:
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            lines.append(f"{direction}, after / before: median {middle:.3f}, {low:.3f} to {high:.3f} of {len(ratios)}")
    text = "\n".join(lines) + "\n"
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
