"""python bench/duel_aa.py OUT [--device cuda] [--count 200] [--processes 0] [--share 0.03]: are equal backends equal?

Runs duels of a backend with another instance of itself, which has tensors of its own at addresses of its own: `count`
in one process, as many as `processes` with `attn-exp duel` in a process each, and `count` with an instance that takes
`share` more time. Writes OUT/duel_aa.csv, a line for each duel, and OUT/duel_aa.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from rows import write_rows

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.backends.sdpa import Flash
from attn_exp.core.case.case import Case
from attn_exp.core.record.request import Measuring, Request
from attn_exp.execution.duel import compare_pairs
from attn_exp.results.calibration import device_key, margin_for
from attn_exp.timers.gpu import SLEEP_CYCLES_PER_US
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.measure import measure_case

SIZES = {"cuda": {"batch": 8, "seq_len": 2048}, "cpu": {"batch": 1, "seq_len": 128}}
BUDGET_S = {"cuda": 5.0, "cpu": 1.0}


class Slowed(Flash):
    """Flash, and then `us` of sleep."""

    def __init__(self, us: float, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self.us = us

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return flash's calls with a forward that sleeps at its end."""
        calls = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            out = calls.forward()
            if out.is_cuda:
                torch.cuda._sleep(int(self.us * SLEEP_CYCLES_PER_US))
            else:
                until = time.perf_counter() + self.us / 1e6
                while time.perf_counter() < until:
                    pass
            return out

        return replace(calls, forward=forward)


def request(letter: str, device: str, slowed_us: float = 0.0) -> Request:
    """The request of one rival."""
    size = SIZES[device]
    heads, dim, dtype = (16, 128, "bfloat16") if device == "cuda" else (2, 32, "float32")
    case = Case(batch=size["batch"], q_heads=heads, kv_heads=heads, q_len=size["seq_len"], kv_len=size["seq_len"],
                head_dim=dim, value_dim=dim, dtype=dtype)  # fmt: skip
    target = {"_target_": f"{Path(__file__).stem}:Slowed", "us": slowed_us} if slowed_us else {}
    backend = {"_target_": "attn_exp.backends.sdpa.Flash", "name": "flash"} | target
    measuring = Measuring(timer="device" if device == "cuda" else "cpu", also=(), precision=0.005, min_rounds=7,
                          max_rounds=40, budget_s=BUDGET_S[device], regime="burst", passes=("forward",),
                          seed=7)  # fmt: skip
    return Request(job=f"{letter}-flash", sweep="aa", model="aa", device=device, case=case, backend=backend,
                   measuring=measuring, label=f"{letter}=flash")  # fmt: skip


def here(machine: Machine, device: str, slowed_us: float = 0.0) -> dict[str, object]:
    """One duel in this process."""
    began = time.perf_counter()
    records = measure_case([request("a", device), request("b", device, slowed_us)], machine)
    for record in records:
        assert record.status == "ok", record.reason
    (pair,) = compare_pairs(records, "forward", margin_for(device_key(machine.environment)))
    return row(pair.verdict, pair.effect, pair.low, pair.high, pair.rounds, pair.margin, began) | {
        "flags": " ".join(sorted({flag for record in records for flag in record.flags}))
    }


def apart(device: str) -> dict[str, object]:
    """One duel with the command, in a process of its own."""
    began = time.perf_counter()
    words = [f"{key}={value}" for key, value in SIZES[device].items()]
    model = [] if device == "cuda" else ["model.q_heads=2", "model.kv_heads=2", "model.head_dim=32", "dtype=fp32"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "attn_exp", "duel", "a=flash", "b=flash", *words, *model, f"device={device}",
             "passes=[forward]", f"stopping.budget_s={BUDGET_S[device]}", "tracker=none"],
            cwd=folder, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        ((pair,),) = json.loads(next(Path(folder).glob("multirun/*/duel.json")).read_text()).values()
    names = ("verdict", "effect", "low", "high", "rounds", "margin")
    return row(*(pair[name] for name in names), began) | {"flags": ""}


def row(verdict, effect, low, high, rounds, margin, began):
    """A line of the file."""
    return {"verdict": verdict, "effect": f"{effect:.5f}", "low": f"{low:.5f}", "high": f"{high:.5f}",
            "rounds": rounds, "margin": margin, "seconds": f"{time.perf_counter() - began:.2f}"}  # fmt: skip


def main() -> None:
    """Run the duels and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.03)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    # Of worker processes, as attn-exp starts them.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    # Before this process opens the GPU, which the others would find `shared_gpu` then: a duel decides little on such.
    rows = [{"what": "A/A, a process each"} | apart(given.device) for _ in range(given.processes)]
    machine = Machine.open(given.device)
    rows += [{"what": "A/A, one process"} | here(machine, given.device) for _ in range(given.count)]
    (alone,) = measure_case([request("a", given.device)], machine)
    us = given.share * alone.metrics["forward/time_us"]
    rows += [{"what": f"+{100 * given.share:g} %"} | here(machine, given.device, us) for _ in range(given.count // 2)]
    given.out.mkdir(parents=True, exist_ok=True)
    write_rows(given.out / "duel_aa.csv", rows)
    lines = []
    for what in dict.fromkeys(str(one["what"]) for one in rows):
        of = [one for one in rows if one["what"] == what]
        counts = Counter(str(one["verdict"]) for one in of)
        effects = sorted(abs(float(str(one["effect"]))) for one in of)
        lines.append(
            f"{what}: {len(of)} duels, told apart {counts['faster'] + counts['slower']}, "
            f"equivalent {counts['equivalent']}, undecided {counts['undecided']}; "
            f"|effect| median {100 * effects[len(effects) // 2]:.2f} %, largest {100 * effects[-1]:.2f} %"
        )
    (given.out / "duel_aa.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
