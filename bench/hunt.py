"""python bench/hunt.py FOLDER: hunts for the bugs of tests/planted_kernels.py, and in backends without a known bug.

Writes FOLDER/planted.csv and FOLDER/backends.csv with a row for each search, and of each find the program that shows
it, FOLDER/bug_NAME.py.
"""

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Seconds of each search.
PLANTED = {
    "off_by_one_at_a_tile": 60, "no_softcap": 60, "nan_without_a_key": 60, "wrong_heads": 60,
    "raises_at_odd_lengths": 60, "segfaults_at_wide_heads": 60, "int32_strides": 60,
}  # fmt: skip
BACKENDS = {"flash": 180, "math": 180, "eager": 180, "auto": 60}
COLUMNS = (
    "name",
    "budget_s",
    "seed",
    "found",
    "after_s",
    "wall_s",
    "tried",
    "large",
    "sentence",
    "smallest",
    "program",
)


def searched(name: str, words: list[str], budget_s: int, seed: int, folder: Path) -> dict[str, object]:
    """Run one search and return its row."""
    path = folder / f"bug_{name}.py"
    command = [sys.executable, "-m", "attn_exp", "hunt", *words, f"budget={budget_s}s", f"seed={seed}", "device=cpu"]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([*command, f"script={path}"], capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    wall_s = time.monotonic() - began
    found = re.search(r"found after ([\d.]+) s; the smallest case that shows it: (.*)", done.stdout)
    tried = re.search(r"(\d+) examples in", done.stdout)
    large = re.search(r"(\d+) of them with offsets above", done.stdout)
    shown = re.search(r"without attn_exp \((.*)\)", done.stdout)
    return {
        "name": name, "budget_s": budget_s, "seed": seed, "found": done.returncode,
        "after_s": found[1] if found else "", "wall_s": f"{wall_s:.1f}", "tried": tried[1] if tried else "",
        "large": large[1] if large else 0, "sentence": done.stdout.splitlines()[0],
        "smallest": found[2] if found else "", "program": shown[1] if shown else "",
    }  # fmt: skip


def main() -> None:
    """Search everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("planted", "backends"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(platform.processor() or platform.machine(), os.cpu_count(), "processors, load", os.getloadavg()[0])
    planted = {name: ["backend._target_=planted.Planted", f"backend.kernel={name}"] for name in PLANTED}
    backends = {name: [f"backend={name}"] for name in BACKENDS}
    for table, searches, budgets in (("planted", planted, PLANTED), ("backends", backends, BACKENDS)):
        if given.only not in (None, table):
            continue
        with open(given.folder / f"{table}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for name, words in searches.items():
                row = searched(name, words, budgets[name], given.seed, given.folder)
                writer.writerow(row)
                file.flush()
                print(name, row["found"], row["after_s"], row["sentence"], flush=True)


if __name__ == "__main__":
    main()
