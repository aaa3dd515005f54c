"""cuDNN's fused attention at fp8: e4m3 codes in and out, with scales (`sdpa_fp8`, `sdpa_fp8_backward`).

Scales are float32 tensors of shape (1, 1, 1, 1) on the device. The scales of p and of the output are known in advance:
p is at most 1, and an output, a mean of values, at most the largest value. Those of ds and of the gradients are
measured by two calls before the first timed one, as training takes them from the previous step. They leave room for
twice as large numbers, since a later step's differ from the measured ones.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType

import torch

from attn_exp.attention.inputs import E4M3_MAX, Gradients, Inputs, Scales
from attn_exp.backends.base import Calls
from attn_exp.backends.cudnn_plan import (
    Operand,
    backward_options,
    build,
    mask_options,
    node_of,
    operand,
    operand_of,
    room_for_stats,
    sequence_lengths,
)
from attn_exp.backends.package import Refused
from attn_exp.core.case.case import Case

_HOPPER = 9
# In 560,000 pairs of steps whose inputs differ by signs, the second's largest gradient was above twice the first's in
# 0.4 %, and never above three times. Transformer Engine's DelayedScaling has `margin` for it.
_MARGIN = 2.0
_DIM_MULTIPLE = 16


def fp8_refusal(case: Case, capability: tuple[int, int]) -> str | None:
    """Return why cuDNN has no fp8 for this case on a GPU of this compute capability, or None.

    Checks only what holds in every version (cudnn_frontend/node/sdpa_support_surface.h); cuDNN reports the rest itself.
    """
    if capability[0] < _HOPPER:
        return f"computes {case.dtype} from compute capability 9.0 on, this GPU has {'.'.join(map(str, capability))}"
    odd = [dim for dim in (case.head_dim, case.value_dim) if dim % _DIM_MULTIPLE]
    if odd:
        return f"needs head dimensions that are multiples of {_DIM_MULTIPLE} at {case.dtype}, not {odd[0]}"
    if capability[0] == _HOPPER and not case.dense and not case.square and case.align != "top_left":
        return f"aligns a causal mask top_left at {case.dtype} on this GPU: set align=top_left"
    return None


def fp8_calls(cudnn: ModuleType, api: str, case: Case, placed: Inputs, *, deterministic: bool) -> Calls:
    """Return the calls of a quantised case.

    The backward is built, and its scales are measured, when it is first requested. The output and the gradients are
    codes with the scales in `Calls.scales`: cuDNN writes other dtypes only from Blackwell on.
    """
    scales = placed.scales
    if scales is None:
        raise ValueError("the inputs are no codes with scales")
    device = placed.q_bhsd.device
    out_bhsd = torch.empty_like(placed.d_out_bhsd)
    stats = [operand(room_for_stats(case, device))] if placed.q_bhsd.requires_grad else []
    common = {name: operand_of(case, tensor) for name, tensor in zip("qkv", placed.qkv, strict=True)}
    common |= _operands(_common_scales(scales), device) | sequence_lengths(case, device)
    options = {"attn_scale": case.head_dim**-0.5, **mask_options(cudnn, case)}
    plan = build(
        cudnn,
        api,
        node_of("sdpa_fp8", generate_stats=bool(stats), **options),
        common | _operands({"scale_o": 1 / scales.v}, device),
        # Declare the amax of p although nothing reads it: then only cuDNN's own engines are candidates.
        [operand_of(case, out_bhsd), *stats, *_amaxes(2, device)],
    )
    notes = plan.notes("forward")
    code_scales = {"out": scales.v}

    def forward() -> torch.Tensor:
        plan.run()
        return out_bhsd

    def built_backward(out: torch.Tensor) -> tuple[Callable[[], Gradients], Callable[[], dict[str, float]]]:
        saved = {"o": operand_of(case, out), "dO": operand_of(case, placed.d_out_bhsd), "stats": stats[0]}
        known = _operands({"descale_o": scales.v, "descale_dO": scales.d_out}, device)
        sought = _operands(dict.fromkeys(("descale_dP", "scale_dP", "scale_dQ", "scale_dK", "scale_dV"), 1.0), device)
        gradients = tuple(torch.empty_like(tensor) for tensor in placed.qkv)
        amaxes = _amaxes(4, device)
        try:
            backward_plan = build(
                cudnn,
                api,
                node_of("sdpa_fp8_backward", **options, **backward_options(case, deterministic=deterministic)),
                common | saved | known | sought,
                [*(operand_of(case, gradient) for gradient in gradients), *amaxes],
            )
        except Refused as error:
            raise Refused(f"{error}: set passes=[forward]") from error
        notes.update(backward_plan.notes("backward"))

        def call() -> Gradients:
            backward_plan.run()
            return gradients

        return call, partial(_gradient_scales, backward_plan.run, sought, amaxes)

    built: list[tuple[Callable[[], Gradients], Callable[[], dict[str, float]]]] = []

    def backward(out: torch.Tensor) -> Callable[[], Gradients]:
        # Every forward writes the same output, so one plan serves all of them; each has scales of its own.
        if not built:
            built.append(built_backward(out))
        call, measured_scales = built[0]
        gradient_scales = measured_scales()
        code_scales.update(gradient_scales)
        notes.update({f"scale_{name}": scale for name, scale in gradient_scales.items()})
        return call

    return Calls(forward, backward, inputs=placed, notes=notes, scales=code_scales)


def _common_scales(scales: Scales) -> dict[str, float]:
    """Return the scales of both passes: `descale_X` turns codes into numbers, `scale_X` numbers into codes."""
    inputs = {"descale_q": scales.q, "descale_k": scales.k, "descale_v": scales.v}
    return inputs | {"descale_s": 1 / E4M3_MAX, "scale_s": E4M3_MAX}


def _gradient_scales(
    run: Callable[[], None], sought: Mapping[str, Operand], amaxes: Sequence[Operand]
) -> dict[str, float]:
    """Set the scales of ds and of the gradients, and return the factors of the gradients' codes.

    Each run reports the largest magnitudes before scaling; the second run already has the scale of ds.
    """
    *of_gradients, of_ds = amaxes
    for amax in amaxes:
        # A measurement must not keep the largest one of an earlier forward.
        amax.tensor.zero_()
    run()
    ds_scale = _scale_of(of_ds)
    sought["descale_dP"].tensor.fill_(ds_scale)
    sought["scale_dP"].tensor.fill_(1 / ds_scale)
    run()
    gradient_scales = {name: _scale_of(amax) for name, amax in zip(("dq", "dk", "dv"), of_gradients, strict=True)}
    for name, scale in zip(("scale_dQ", "scale_dK", "scale_dV"), gradient_scales.values(), strict=True):
        sought[name].tensor.fill_(1 / scale)
    return gradient_scales


def _scale_of(amax: Operand) -> float:
    largest = amax.tensor.item()
    # Zero where every query sees one key. The accuracy check finds what is not finite.
    return _MARGIN * largest / E4M3_MAX if largest > 0 and math.isfinite(largest) else 1.0


def _operands(values: Mapping[str, float], device: torch.device) -> dict[str, Operand]:
    return {name: operand(_single(value, device)) for name, value in values.items()}


def _amaxes(count: int, device: torch.device) -> list[Operand]:
    return [operand(_single(0.0, device)) for _ in range(count)]


def _single(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=device)
