"""A backend that tells all it knows: its whole environment, into the worker's log."""

import os
from functools import partial

from torch.nn.functional import scaled_dot_product_attention as sdpa

from attn_exp.attention.inputs import autograd_backward
from attn_exp.backends.base import Calls


class Teller:
    def __init__(self, name, token=None):
        self.name = name

    def unsupported(self, case, device):
        return None

    def prepare(self, case, inputs):
        print("\n".join(f"told {name}={value}" for name, value in os.environ.items()), flush=True)
        return Calls(partial(sdpa, *inputs.qkv, is_causal=case.causal), partial(autograd_backward, inputs))

    def claimed_kernels(self, direction, device):
        return None
