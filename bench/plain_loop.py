"""python bench/plain_loop.py OUT.csv: the yardstick, S1's 30 configurations in a plain loop.

Forward and backward of SDPA's own choice by `do_bench_using_profiling`, no checks; one table, one CSV, as PyTorch's
benchmarks/transformer/sdpa.py does, whose configurations these are and whose backward accumulates gradients, too. The
loop is ours.
"""

import csv
import itertools
import sys
import time

started = time.perf_counter()

import torch  # noqa: E402  (the import is part of what is timed)
import torch.nn.functional as F  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch._inductor.utils import do_bench_using_profiling  # noqa: E402

HEADS, HEAD_DIM = 16, 128
NAMES = ("batch", "seq_len", "causal", "forward_us", "backward_us", "forward_tflops", "backward_tflops")


def measure(batch: int, seq_len: int, causal: bool) -> tuple[float, float]:
    """Forward and backward time of one configuration in microseconds."""
    q, k, v = (
        torch.randn(batch, HEADS, seq_len, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    out = forward()
    d_out = torch.randn_like(out)

    def backward() -> None:
        out.backward(d_out, retain_graph=True)

    return do_bench_using_profiling(forward) * 1e3, do_bench_using_profiling(backward) * 1e3


def main(path: str) -> None:
    torch.manual_seed(123)
    loop_started = time.perf_counter()
    rows = []
    for causal, batch, seq_len in itertools.product((True, False), (1, 8, 16), (128, 256, 512, 1024, 8192)):
        forward_us, backward_us = measure(batch, seq_len, causal)
        flops = batch * HEADS * seq_len**2 * (4 * HEAD_DIM + 2) / (2 if causal else 1)
        rates = (f"{share * flops / us / 1e6:.2f}" for share, us in ((1.0, forward_us), (2.5, backward_us)))
        rows.append((batch, seq_len, causal, f"{forward_us:.3f}", f"{backward_us:.3f}", *rates))
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        writer.writerows(rows)
    print(tabulate(rows, NAMES))
    now = time.perf_counter()
    print(f"plain loop: {now - loop_started:.1f} s for {len(rows)} configurations, {now - started:.1f} s with start-up")


if __name__ == "__main__":
    main(sys.argv[1])
