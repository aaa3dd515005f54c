"""Our own fused attention in Triton; the kernels are in attn_exp/kernels."""

from functools import partial

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of
from attn_exp.backends.package import Package
from attn_exp.backends.supports import Supports
from attn_exp.core.case import Case


class Triton(DeclarativeBackend):
    """Our own fused attention in Triton, forward and backward, autotuned."""

    supports = Supports(
        dtypes=("bfloat16", "float16", "float32"), window=True, softcap=True, keyless=True,
        largest_head_dim=256, value_dims="any", capability=(8, 0),
    )  # fmt: skip
    generates_triton = True
    package = Package("triton", "triton", "pip install triton")
    claims = {("cuda", "forward"): r"^forward_kernel", ("cuda", "backward"): r"^(dkdv_kernel|dq_kernel)"}

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Return the operator's calls; Triton compiles and tunes in the first calls."""
        assert self.package is not None
        self.package.load()
        from attn_exp.kernels.triton_attention import attention

        call = partial(attention, causal=not case.dense, offset=case.offset, window=case.window, softcap=case.softcap)
        return calls_of(call, inputs)
