"""python bench/fp8_backward.py OUT_FOLDER: how cuDNN's fp8 backward spreads, and what does not explain its causal time.

On the shapes of cuDNN's published figures: both layouts, the inputs' own scales or all scales 1 as in the published
benchmark, and full attention beside it. Ten calls each on a rested GPU, flushed by writing, traced one by one. Writes
fp8_backward.csv: the attention kernel alone, and all kernels of the pass. One GPU with cuDNN's front end, a minute.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cudnn
import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from attn_exp.backends.cudnn_case import Operand, operand
from attn_exp.backends.cudnn_plan import NODE, build
from attn_exp.measure import BURST_REST_S
from attn_exp.quantise import E4M3_MAX

Q_HEADS, KV_HEADS, DIM = 64, 8, 128
LENGTHS = (2048, 4096, 8192, 16384)
CALLS, WARM_CALLS = 10, 2
GRADIENTS = ("scale_dQ", "scale_dK", "scale_dV")


def single(value: float) -> Operand:
    """A scale or a largest magnitude, as cuDNN takes it."""
    return operand(torch.full((1, 1, 1, 1), value, dtype=torch.float32, device="cuda"))


def codes(heads: int, length: int, layout: str, scales: str) -> tuple[torch.Tensor, float]:
    """Normal numbers (1, heads, length, DIM) as e4m3 codes, and what a code of 1 is worth."""
    numbers = torch.randn(1, length, heads, DIM, dtype=torch.bfloat16, device="cuda")
    scale = numbers.abs().max().item() / E4M3_MAX if scales == "own" else 1.0
    found = (numbers / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).transpose(1, 2)
    return (found if layout == "bshd" else found.contiguous()), scale


def backward_of(length: int, layout: str, scales: str, *, causal: bool) -> Callable[[], None]:
    """cuDNN's backward after its forward; with own scales those of the gradients are read off calls before."""
    torch.manual_seed(0)
    tensors = {}
    known = {}
    for name, heads in (("q", Q_HEADS), ("k", KV_HEADS), ("v", KV_HEADS), ("dO", Q_HEADS)):
        tensors[name], known[f"descale_{name}"] = codes(heads, length, layout, scales)
    p_scale = E4M3_MAX if scales == "own" else 1.0
    d_out = operand(tensors.pop("dO"))
    d_out_scale = single(known.pop("descale_dO"))
    out, stats = operand(torch.empty_like(d_out.tensor)), operand(torch.empty(1, Q_HEADS, length, 1, device="cuda"))
    common = {name: operand(tensor) for name, tensor in tensors.items()}
    common |= {name: single(scale) for name, scale in known.items()}
    common |= {"descale_s": single(1 / p_scale), "scale_s": single(p_scale)}
    options: dict[str, Any] = {"name": NODE, "attn_scale": DIM**-0.5}
    if causal:
        options |= {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0}
    forward = build(
        cudnn, "binding", lambda graph, **given: graph.sdpa_fp8(generate_stats=True, **options, **given),
        common | {"scale_o": single(1 / known["descale_v"])}, [out, stats, single(0), single(0)],
    )  # fmt: skip
    sought = {name: single(1) for name in ("descale_dP", "scale_dP", *GRADIENTS)}
    saved = {"o": out, "dO": d_out, "stats": stats, "descale_o": single(known["descale_v"]), "descale_dO": d_out_scale}
    largest = [single(0) for _ in range(4)]
    backward = build(
        cudnn, "binding", lambda graph, **given: graph.sdpa_fp8_backward(**options, **given), common | saved | sought,
        [*(operand(torch.empty_like(tensor)) for tensor in tensors.values()), *largest],
    )  # fmt: skip
    forward.run()
    if scales == "own":
        backward.run()
        of_ds = largest[3].tensor.item() / E4M3_MAX
        sought["descale_dP"].tensor.fill_(of_ds)
        sought["scale_dP"].tensor.fill_(1 / of_ds)
        backward.run()
        for name, found in zip(GRADIENTS, largest, strict=False):
            sought[name].tensor.fill_(E4M3_MAX / found.tensor.item())
    return backward.run


def traced(call: Callable[[], None], flushed: torch.Tensor) -> tuple[float, float]:
    """One call's attention kernel and all of its kernels, in microseconds."""
    time.sleep(BURST_REST_S)
    flushed.zero_()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    kernels = {one.key: one.self_device_time_total for one in seen.key_averages() if one.self_device_time_total}
    return max(kernels.values()), sum(kernels.values())


def row(length: int, layout: str, scales: str, flushed: torch.Tensor, *, causal: bool) -> dict[str, object]:
    """The medians and spread of one variant."""
    call = backward_of(length, layout, scales, causal=causal)
    pairs = [traced(call, flushed) for _ in range(WARM_CALLS + CALLS)][WARM_CALLS:]
    longest, whole = ([pair[which] for pair in pairs] for which in (0, 1))
    flops = 10 * Q_HEADS * DIM * length**2 * (0.5 if causal else 1.0)
    return {
        "length": length,
        "causal": causal,
        "layout": layout,
        "scales": scales,
        "kernel_us": round(statistics.median(longest), 1),
        "least_us": round(min(longest), 1),
        "most_us": round(max(longest), 1),
        "pass_us": round(statistics.median(whole), 1),
        "pass_tflops": round(flops / statistics.median(whole) / 1e6, 1),
    }


def main(out: Path) -> None:
    """Time all variants, write, print."""
    flushed = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    variants = [partial(row, causal=True), partial(row, causal=False)]
    rows = [
        variant(length, layout, scales, flushed)
        for length, variant, layout, scales in product(LENGTHS, variants, ("bhsd", "bshd"), ("own", "ones"))
    ]
    out.mkdir(parents=True, exist_ok=True)
    with (out / "fp8_backward.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{torch.cuda.get_device_name()}, cuDNN {cudnn.backend_version()}, front end {cudnn.__version__}")
    print(tabulate(rows, headers="keys"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
