"""python examples/decode_model.py [TABLE]: tokens/s of a small decoder with SDPA's own choice and with a table's picks.

The weights are random. Without a TABLE (`attn-exp pick SWEEP out=TABLE`) one is made of a small sweep of this machine.
Both ways take turns, round by round in both orders, so that a drift of the machine meets both; the interval is that of
the median ratio of a round, by order statistics (rounds 6 and 15 of 20: 95.9 %).
"""

import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import attn_exp.dispatch

LAYERS, HEADS, KV_HEADS, DIM, KEYS = 2, 8, 2, 64, 1024
TOKENS, ROUNDS = 16, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Layer(torch.nn.Module):
    """Attention over a static cache, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.q, self.out = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, KV_HEADS, KEYS, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(1, 1, HEADS, DIM).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def seconds(model: torch.nn.Module, x: torch.Tensor) -> float:
    """The time of decoding TOKENS tokens, each with the one before."""
    began = time.perf_counter()
    for _ in range(TOKENS):
        x = F.layer_norm(model(x), x.shape[-1:])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def table() -> str:
    """A table of this shape on this machine."""
    shape = (
        f"model.q_heads={HEADS}",
        f"model.kv_heads={KV_HEADS}",
        f"model.head_dim={DIM}",
        "q_len=1",
        f"kv_len={KEYS}",
    )
    attn_exp.run("backend=auto,flash,math", *shape, "passes=[forward]", "stopping=quick", "sweep=decode_model")
    pick = [sys.executable, "-m", "attn_exp", "pick", "decode_model", "out=decode_model.json"]
    if subprocess.run(pick).returncode:
        sys.exit("without picks there is nothing to compare: try again on an idle machine")
    return "decode_model.json"


@torch.inference_mode()
def main() -> None:
    picks = attn_exp.dispatch.load(sys.argv[1] if len(sys.argv) > 1 else table())
    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS))).to(DEVICE, DTYPE)
    x = torch.randn(1, 1, HEADS * DIM, device=DEVICE, dtype=DTYPE)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(-2, ROUNDS):  # two rounds to warm up
        for picked in (False, True) if number % 2 else (True, False):
            if picked:
                with picks:
                    own = seconds(model, x)
            else:
                own = seconds(model, x)
            taken[picked] += [own] if number >= 0 else []
    for picked, name in ((False, "SDPA's own choice"), (True, "the table's picks")):
        print(f"{name}: {TOKENS / statistics.median(taken[picked]):.0f} tokens/s")
    ratios = sorted(plain / own for plain, own in zip(taken[False], taken[True], strict=True))
    low, high = ratios[5], ratios[14]
    verdict = "faster" if low > 1 else "slower" if high < 1 else "too close to call"
    print(f"with picks {statistics.median(ratios):.3f} x as fast [{low:.3f}, {high:.3f}]: {verdict}")


if __name__ == "__main__":
    main()
