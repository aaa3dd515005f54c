"""python bench/fp8_backward.py: how cuDNN's fp8 backward spreads, and what does not explain its causal time.

On the shapes of cuDNN's published figures (64 query heads share 8 of 128): both layouts, the inputs' own scales
(`real`) or all scales 1 as in the published benchmark (`unit`), the causal mask as a band or by the old argument, and
full attention beside it, and new random tensors before each call, as in the published benchmark. 40 calls each,
flushed by writing and traced one by one: the attention kernel (`main`, its median, range and quartiles) and all kernels
of the pass. One GPU with cuDNN's front end, a minute.
"""

import cudnn
import torch
from torch.profiler import ProfilerActivity, profile

from attn_exp.backends.cudnn_plan import build, operand

E4M3 = torch.float8_e4m3fn
BATCH, Q_HEADS, KV_HEADS, DIM = 1, 64, 8, 128
DEVICE = torch.device("cuda")
CALLS, WARM_CALLS = 40, 2


def one(value):
    return operand(torch.full((1, 1, 1, 1), float(value), device=DEVICE))


def codes(heads, length, layout, unit):
    numbers = torch.randn(BATCH, length, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    scale = 1.0 if unit else numbers.abs().max().item() / 448
    found = (numbers / scale).clamp(-448, 448).to(E4M3).transpose(1, 2)
    return (found if layout == "bshd" else found.contiguous()), scale


def like(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)


def variant(flush, length, layout, unit, causal, align="TOP_LEFT", old=False, fresh=False):
    torch.manual_seed(0)
    (q, q_scale), (k, k_scale), (v, v_scale) = (codes(h, length, layout, unit) for h in (Q_HEADS, KV_HEADS, KV_HEADS))
    d_out, d_out_scale = codes(Q_HEADS, length, layout, unit)
    out, stats = like(d_out), torch.empty(BATCH, Q_HEADS, length, 1, device=DEVICE)
    p_scale = 1.0 if unit else 448.0
    band = {"diagonal_alignment": getattr(cudnn.diagonal_alignment, align), "right_bound": 0} if causal else {}
    backward_band = {"use_causal_mask": True} if causal and old else band
    common = {name: operand(tensor) for name, tensor in {"q": q, "k": k, "v": v}.items()}
    common |= {"descale_q": one(q_scale), "descale_k": one(k_scale), "descale_v": one(v_scale)}
    common |= {"descale_s": one(1 / p_scale), "scale_s": one(p_scale)}
    out_scale = 1.0 if unit else 1 / v_scale
    forward = build(
        cudnn, "binding",
        lambda g, **given: g.sdpa_fp8(name="sdpa", generate_stats=True, attn_scale=DIM**-0.5, **band, **given),
        common | {"scale_o": one(out_scale)}, [operand(out), operand(stats), one(0), one(0)],
    )  # fmt: skip
    largest = [one(0) for _ in range(4)]
    sought = {name: one(1) for name in ("descale_dP", "scale_dP", "scale_dQ", "scale_dK", "scale_dV")}
    saved = {"o": operand(out), "dO": operand(d_out), "stats": operand(stats)}
    saved |= {"descale_o": one(1 / out_scale), "descale_dO": one(d_out_scale)}
    backward = build(
        cudnn, "binding",
        lambda g, **given: g.sdpa_fp8_backward(name="sdpa", attn_scale=DIM**-0.5, **backward_band, **given),
        common | saved | sought, [operand(like(q)), operand(like(k)), operand(like(v)), *largest],
    )  # fmt: skip
    forward.run()
    backward.run()
    torch.cuda.synchronize()
    if not unit:
        of_ds = largest[3].tensor.item()
        sought["descale_dP"].tensor.fill_(of_ds / 448)
        sought["scale_dP"].tensor.fill_(448 / of_ds)
        backward.run()
        torch.cuda.synchronize()
        for name, found in zip(("scale_dQ", "scale_dK", "scale_dV"), largest, strict=False):
            sought[name].tensor.fill_(448 / found.tensor.item())
    mains, sums = [], []
    torch.cuda._sleep(int(1.98e9 * 0.2))
    torch.cuda.synchronize()
    for index in range(WARM_CALLS + CALLS):
        if fresh:
            for tensor, heads in ((q, Q_HEADS), (k, KV_HEADS), (v, KV_HEADS), (d_out, Q_HEADS)):
                tensor.copy_(codes(heads, length, layout, unit=True)[0])
            forward.run()
        flush.zero_()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            backward.run()
            torch.cuda.synchronize()
        kernels = [kernel for kernel in seen.key_averages() if kernel.self_device_time_total > 0]
        if index >= WARM_CALLS:
            mains.append(sum(one.self_device_time_total for one in kernels if one.key.startswith("cudnn")))
            sums.append(sum(one.self_device_time_total for one in kernels))
    flops = 10 * BATCH * Q_HEADS * DIM * length * length * (0.5 if causal else 1)
    mains.sort()
    sums.sort()
    main, whole = mains[len(mains) // 2], sums[len(sums) // 2]
    mask = f"{'causal' if causal else 'full'} {align} {'old' if old else 'band'}"
    spread = ", ".join(f"{mains[at * (len(mains) - 1) // 4]:.0f}" for at in range(5))
    how = f"{layout} {'unit' if unit else 'real'} {mask}{' fresh' * fresh}"
    print(
        f"{length:6} {how}: main {main:8.1f} us [{spread}] {flops / main / 1e6:6.1f}  "
        f"all {whole:8.1f} us {flops / whole / 1e6:6.1f} TFLOPS",
        flush=True,
    )


if __name__ == "__main__":
    buffer = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    print(torch.cuda.get_device_name(), cudnn.backend_version(), cudnn.__version__)
    for tokens in (4096, 8192, 2048, 16384):
        for where in ("bhsd", "bshd"):
            for ones in (False, True):
                variant(buffer, tokens, where, ones, causal=True)
        variant(buffer, tokens, "bshd", True, causal=True, old=True)
        variant(buffer, tokens, "bshd", True, causal=True, fresh=True)
        variant(buffer, tokens, "bshd", True, causal=False)
