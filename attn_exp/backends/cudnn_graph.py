"""cuDNN's fused attention as its own graph, through the `cudnn` package: no PyTorch operator in the timed call."""

from collections.abc import Callable

import torch

from attn_exp.attention.inputs import Gradients, Inputs, paged, sinks_in
from attn_exp.backends.base import FUSED_SHARE, Calls, DeclarativeBackend
from attn_exp.backends.cudnn_fp8 import fp8_calls, fp8_refusal
from attn_exp.backends.cudnn_plan import (
    backward_options,
    band_of,
    build,
    mask_options,
    node_of,
    operand,
    operand_of,
    paged_operands,
    room_for_stats,
    sequence_lengths,
)
from attn_exp.backends.package import Package, Refused, WrongOption
from attn_exp.backends.sdpa import Cudnn
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import E4M3, LAYOUTS, Case

APIS = ("binding", "wrapper")


class CudnnGraph(DeclarativeBackend):
    """cuDNN's fused attention as a graph of the cudnn package, without PyTorch's dispatch.

    A graph is built once, with statistics only if gradients are requested. Each call writes into the same tensors.
    Pages are written against cudnn-frontend 1.32 and have not run.

    Args:
        name: the backend's name.
        api: `binding` (`cudnn.pygraph`) or `wrapper` (`cudnn.Graph`).
        layout: the layout of the tensors: `bshd`, `bhsd`, or None for the case's.
        deterministic: sum dq in a fixed order. On Hopper cuDNN then keeps the gradients of all scores in its workspace;
            from 9.25 on CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=0 in the environment avoids that.
    """

    # cuDNN itself reports what depends on its version and the GPU: head dimensions above 128, windows, ragged offsets.
    supports = Supports(
        dtypes=("bfloat16", "float16", E4M3),
        masks=("window",),
        features=("sink", "packed", "paged"),
        value_dims="any",
        head_dim_multiple=8,
        largest_head_dim=256,
        capability=(8, 0),
    )
    package = Package(distribution="nvidia-cudnn-frontend", module="cudnn", install="pip install 'attn_exp[cudnn]'")
    claimed_share = FUSED_SHARE
    claims = Cudnn.claims
    a_function = False

    def __init__(self, name: str, api: str = "binding", layout: str | None = None, deterministic: bool = False) -> None:
        super().__init__(name)
        if api not in APIS:
            raise WrongOption(f"api={api!r} is not one of {', '.join(APIS)}")
        if layout is not None and layout not in LAYOUTS:
            raise WrongOption(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}, or null for the case's")
        self.api, self.layout, self.deterministic = api, layout, deterministic

    def unsupported(self, case: Case, device: str) -> str | None:
        """Also refuse packed sequences through the wrapper, which takes no ragged offsets, and what fp8 lacks."""
        refusal = super().unsupported(case, device)
        if refusal is None and case.lengths is not None and self.api == "wrapper":
            return f"{self.name} has no packed sequences through cudnn.Graph: set backend.api=binding"
        if refusal is None and case.page_size is not None and (case.lengths is not None or self.api == "wrapper"):
            return f"{self.name} takes pages of rows through cudnn.pygraph: set lengths=null and backend.api=binding"
        if refusal is None and case.sink:
            # https://github.com/NVIDIA/cudnn-frontend/blob/main/benchmark/attention_inference/README.md: sinks have no
            # fp8 and no single query. The gradient sums over all rows of a padded batch.
            others = {"one query": case.q_len == 1, "packed sequences": case.lengths is not None, "fp8": case.quantised}
            others["cudnn.Graph"] = self.api == "wrapper"
            lacking = next((name for name, has in others.items() if has), None)
            refusal = lacking and f"{self.name} has no sinks with {lacking}: set sink=false, or leave {lacking} out"
        if refusal is None and case.quantised:
            refusal = fp8_refusal(case, torch.cuda.get_device_capability())
            return f"{self.name} {refusal}" if refusal else None
        return refusal

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Convert the layout, build the forward's graph and allocate outputs.

        The backward is built when it is first requested, so that each pass's first call includes its own build time. It
        then adds its figures to `notes`. Raises Refused for gradients of packed sequences with a window, which cuDNN
        computes wrongly.
        """
        cudnn = self.package.load()
        band = band_of(case)
        if case.lengths is not None and band and band.kept_keys is not None and inputs.q_bhsd.requires_grad:
            # On an H100 dk was off by 1.2 of its norm, with four sequences in 1,024 tokens and a window of 100.
            raise Refused(
                "cuDNN 9.19 computes a wrong dk for packed sequences with a window, and no version is known to be "
                f"right (this is {cudnn.backend_version()}): set passes=[forward]"
            )
        placed = paged(case, inputs.laid_out(self.layout or case.layout))
        if case.quantised:
            return fp8_calls(cudnn, self.api, case, placed, deterministic=self.deterministic)
        if placed.paging is not None:
            operands = {"q": operand(placed.q_bhsd), **paged_operands(case, placed)}
        else:
            operands = {name: operand_of(case, tensor) for name, tensor in zip("qkv", placed.qkv, strict=True)}
        sinks = sinks_in(case, placed)
        if sinks is not None:
            operands["sink_token"] = operand(sinks.detach().float())
        out_bhsd = torch.empty_like(placed.d_out_bhsd)
        outputs = [operand_of(case, out_bhsd)]
        with_stats = inputs.q_bhsd.requires_grad
        if with_stats:
            outputs.append(operand(room_for_stats(case, out_bhsd.device)))
        options = {"attn_scale": case.head_dim**-0.5, **mask_options(cudnn, case)}
        plan = build(
            cudnn,
            self.api,
            node_of("sdpa", generate_stats=with_stats, **options),
            operands | sequence_lengths(case, out_bhsd.device),
            outputs,
        )
        notes = plan.notes("forward")
        built: list[Callable[[], Gradients]] = []

        def forward() -> torch.Tensor:
            plan.run()
            return out_bhsd

        def backward(out: torch.Tensor) -> Callable[[], Gradients]:
            # Every forward writes the same output, so one plan serves all of them.
            if not built:
                gradients = tuple(torch.empty_like(tensor) for tensor in placed.qkv)
                returned, of_sinks = gradients, {}
                if placed.sink is not None:
                    # An argument of the node that it writes.
                    of_sinks["dSink_token"] = operand(torch.empty_like(placed.sink, dtype=torch.float32))
                    returned = (*gradients, torch.empty_like(placed.sink))
                saved = {"o": operand_of(case, out), "dO": operand_of(case, placed.d_out_bhsd), "stats": outputs[1]}
                backward_plan = build(
                    cudnn,
                    self.api,
                    node_of("sdpa_backward", **options, **backward_options(case, deterministic=self.deterministic)),
                    operands | saved | of_sinks | sequence_lengths(case, out.device),
                    [operand_of(case, gradient) for gradient in gradients],
                )
                notes.update(backward_plan.notes("backward"))

                def call() -> Gradients:
                    backward_plan.run()
                    for of_token in of_sinks.values():
                        returned[-1].copy_(of_token.tensor)
                    return returned

                built.append(call)
            return built[0]

        return Calls(forward, backward, inputs=placed, notes=notes)
