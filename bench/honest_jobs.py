"""python bench/honest_jobs.py OUT [--jobs N] [--first SEED]

Counts false alarms: whole jobs, checks before and after the timing included, of the backends that run on a CPU, on
random small cases in float32 and bfloat16. No status may be `inaccurate`. OUT/honest_jobs.json has the counts and the
reason of every job that was.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from cheats.run import shared_machine, short
from fakes import make_request

from attn_exp.core.case.case import Case
from attn_exp.worker.measure import measure

BACKENDS = {
    "math": {"_target_": "attn_exp.backends.sdpa.Math", "deterministic": False},
    "flash": {"_target_": "attn_exp.backends.sdpa.Flash", "deterministic": False},
    "eager": {"_target_": "attn_exp.backends.eager.Eager"},
}


def random_case(dice: random.Random) -> Case:
    """A case of at most 256 tokens."""
    length, dim = dice.choice([16, 33, 64, 100, 128, 200, 256]), dice.choice([16, 32, 64, 80])
    causal, kv_heads = dice.random() < 0.6, dice.choice([1, 2])
    return Case(
        batch=dice.choice([1, 1, 2]),
        q_heads=kv_heads * dice.choice([1, 1, 2]),
        kv_heads=kv_heads,
        q_len=length,
        kv_len=length if causal or dice.random() < 0.7 else length + 32,
        head_dim=dim,
        value_dim=dim,
        dtype=dice.choice(["float32", "bfloat16"]),
        causal=causal,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, counts, wrong = time.time(), Counter[str](), []
    machine = shared_machine()
    with short(), mock.patch("attn_exp.worker.limits.fastest_product", return_value=1e18):
        for seed in range(given.first, given.first + given.jobs):
            dice = random.Random(seed)
            case, name = random_case(dice), dice.choice(list(BACKENDS))
            record = measure(make_request({"name": name, **BACKENDS[name]}, case, seed=seed), machine)
            counts[f"{name} {case.dtype} {record.status}"] += 1
            if record.status != "ok" and record.status != "unsupported":
                wrong.append({"seed": seed, "backend": name, "case": str(case), "reason": record.reason})
                print(wrong[-1], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    figures = {
        "jobs": given.jobs,
        "first": given.first,
        "seconds": round(time.time() - began),
        "torch": torch.__version__,
    }
    report = {**figures, "counts": dict(sorted(counts.items())), "not ok": wrong}
    (given.out / "honest_jobs.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
