"""Preload: what the first attention call of any process makes Python and CUDA load, before the first job's clock runs.

It costs seconds that belong to no case, and would stand in the first-call cost of whichever job comes first.
"""

import importlib
import threading

import torch

from attn_exp.case import E4M3, Case
from attn_exp.inputs import make_inputs
from attn_exp.tolerance import expected


def import_autograd() -> threading.Thread:
    """Import in a thread what `torch.autograd.grad` imports when it is first given a gradient: sympy and its kin.

    0.3 s on a fast disk, 2 s on the GPU host (torch 2.11).
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch.fx.experimental.symbolic_shapes",))
    thread.start()
    return thread


def load_libraries(dtype: str) -> None:
    """Run attention of the smallest size on the GPU: cuBLAS, cuDNN, the kernels of reference and comparison.

    In bfloat16 for codes, which PyTorch's SDPA does not take.
    """
    dtype = "bfloat16" if dtype == E4M3 else dtype
    case = Case(batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=128, head_dim=64, value_dim=64, dtype=dtype)
    inputs = make_inputs(case, "cuda", 0, with_gradients=True)
    out = torch.nn.functional.scaled_dot_product_attention(*inputs.qkv)
    expected(case, inputs, with_gradients=True).judge("out", out)
    # Last, since it waits for `import_autograd`.
    torch.autograd.grad(out, inputs.qkv, inputs.d_out_bhsd)
