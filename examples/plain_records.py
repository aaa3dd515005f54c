"""python examples/plain_records.py SWEEP_FOLDER: read records with the standard library only, as any language could.

Each job has one JSON file; docs/records.md lists its fields. Prints CSV with a row for each job and pass; medians are
computed from the samples of the primary timer.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

rows = csv.writer(sys.stdout)
rows.writerow(["backend", "batch", "q_len", "dtype", "status", "pass", "time_us", "samples", "median_of_samples_us"])
for path in sorted(Path(sys.argv[1]).glob("*/record.json")):
    record = json.loads(path.read_text())
    case, request = record["request"]["case"], record["request"]
    job = [request["backend"]["name"], case["batch"], case["q_len"], case["dtype"], record["status"]]
    if record["status"] != "ok":
        rows.writerow([*job, "", "", "", ""])  # there are numbers if and only if the status is ok
    for name, measured in record["passes"].items():
        ranking = next(timing for timing in measured["timings"] if timing["timer"] == request["measuring"]["timer"])
        times_us = ranking["times_us"]
        time_us = record["metrics"].get(f"{name}/time_us")
        rows.writerow([*job, name, time_us, len(times_us), statistics.median(times_us)])
