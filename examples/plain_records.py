"""python examples/plain_records.py SWEEP_FOLDER: records read with the standard library alone, as any language could.

A record is one JSON file a job; docs/records.md has its fields. Prints CSV: a row a job and pass, with the median made
anew from the samples of the timer that ranks.
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
        rows.writerow([*job, "", "", "", ""])  # numbers exist if and only if the status is ok
    for name, measured in record["passes"].items():
        ranking = next(timing for timing in measured["timings"] if timing["timer"] == request["measuring"]["timer"])
        times_us = ranking["times_us"]
        time_us = record["metrics"].get(f"{name}/time_us")
        rows.writerow([*job, name, time_us, len(times_us), statistics.median(times_us)])
