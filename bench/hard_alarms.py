"""python bench/hard_alarms.py [--seeds N] [--first SEED] [--kind KIND] [--bugs]

Counts false alarms on hard values: the honest formulas of tests/test_hard_values.py, forward and backward, on random
small cases of all masks in bf16, fp16 and fp32. With --bugs it also counts which of the planted bugs are missed, where
they move a row of the output by more than half of its norm.
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from test_hard_values import BUGS, DTYPES, honest, tensors_of

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import expected
from attn_exp.attention.hard_values import make_inputs_of
from attn_exp.core.case.case import Case


def random_case(dice: random.Random, dtype: str) -> Case:
    """A case of at most 128 tokens."""
    length, dim = dice.choice([17, 33, 64, 65, 100, 128]), dice.choice([32, 64, 80, 128])
    mask = dice.choice(
        [
            {"causal": True},
            {"causal": False},
            {"causal": True, "window": dice.choice([1, 5, 20])},
            {"causal": True, "softcap": 50.0},
            {"causal": False, "softcap": 30.0},
            {"causal": True, "lengths": (length // 3, length - length // 3)},
        ]
    )
    sizes = {"batch": 1, "q_heads": dice.choice([2, 4]), "kv_heads": 2, "q_len": length, "kv_len": length}
    if "lengths" not in mask and dice.random() < 0.3:
        sizes["q_len"] = dice.choice([1, length // 2])
    return Case(**sizes, head_dim=dim, value_dim=dim, dtype=dtype, **mask)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", default="mixed")
    parser.add_argument("--bugs", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, counted = time.time(), Counter[str]()
    for seed in range(given.first, given.first + given.seeds):
        dice = random.Random(seed)
        for dtype in DTYPES:
            case = random_case(dice, dtype)
            inputs = make_inputs_of(given.kind, case, "cpu", seed, with_gradients=True)
            wanted = expected(case, inputs, with_gradients=True)
            judge = wanted.judge
            for function in honest(case):
                counted["honest"] += 1
                wrong = inaccuracy({name: judge(name, one) for name, one in tensors_of(function, inputs).items()})
                if wrong:
                    counted["false alarms"] += 1
                    print(f"false alarm: seed {seed}, {case.label()}: {wrong}", flush=True)
            for name, (bug, applies) in BUGS.items() if given.bugs else ():
                if applies(case):
                    with torch.no_grad():
                        out = bug(case, *inputs.qkv).to(inputs.q_bhsd.dtype)
                    right = wanted.tensors["out"]
                    moved = (out.float() - right).norm(dim=-1) > right.norm(dim=-1) / 2
                    if not moved.any() and out.isfinite().all():
                        continue
                    counted["bugs"] += 1
                    if not inaccuracy({"out": judge("out", out)}):
                        counted["missed"] += 1
                        print(f"missed: {name}, seed {seed}, {case.label()}", flush=True)
    print(f"{given.seeds} seeds from {given.first}, inputs={given.kind}, {time.time() - began:.0f} s: {dict(counted)}")
    return int(counted["false alarms"] > 0)


if __name__ == "__main__":
    sys.exit(main())
