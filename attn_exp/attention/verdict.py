"""The verdict on the tensors of one call: their form, their errors, and the boundary of the mask."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attn_exp.attention.error import inaccuracy
from attn_exp.attention.expected import Expected
from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.attention.mask_edges import edge_error
from attn_exp.attention.mistakes import mistake
from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.record.checked import TensorError

# The dtypes of results that need no scale: FlashAttention 3 takes codes and returns bfloat16.
_OF_CODES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Verdict:
    """Findings of a judgement.

    Attributes:
        errors: by tensor.
        wrong: the mistake as a sentence, None if there is none.
        rows: rows of all tensors that were looked at.
        rows_of: rows that these tensors have.
        heads: heads of the output that were looked at, in every row of the batch; 0 for a block, which has none.
    """

    errors: dict[str, TensorError]
    wrong: str | None
    rows: int
    rows_of: int
    heads: int


def verdict(
    case: Case,
    inputs: DifferentiableInputs,
    expected: Expected,
    tensors: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
) -> Verdict:
    """Judge the tensors of one call on its inputs, of which a block's have no boundary of a mask.

    Tensors that the reference lacks are not judged, as `d_sink` of hard values. `scales` are the factors of codes.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected.tensors}
    errors = {name: expected.judge(name, tensor, scales.get(name, 1.0)) for name, tensor in tensors.items()}
    wrong = inaccuracy({name: replace(error, worst_tile=None, own_row=None) for name, error in errors.items()})
    # On hard values a boundary key that is missed, or let in, is a needle that the errors show. If scores are large,
    # rounding by itself moves a key's weight.
    if wrong is None and isinstance(inputs, Inputs) and inputs.kind == NORMAL and "out" in tensors:
        # Before the parts of tensors: it says why these are wrong.
        wrong = edge_error(case, inputs, tensors["out"], scales.get("out", 1.0), tensors.get("dq"))
    wrong = wrong or inaccuracy(errors)
    if wrong and "as if scores were scaled" in wrong and case.softcap is not None:
        wrong = f"{wrong}, perhaps by another softcap than {case.softcap:g}"
    if wrong and isinstance(inputs, Inputs) and "out" in tensors:
        named = mistake(case, inputs, tensors, expected.tolerances, scales)
        wrong = wrong if named is None else f"{named}: {wrong}"
    return Verdict(errors, wrong, expected.rows, expected.rows_of, expected.heads)


def malformed(
    name: str, result: object, *, shape: tuple[int, ...], like: torch.Tensor, scales: Mapping[str, float]
) -> str | None:
    """Return what is wrong with the form of a result as a sentence, or None.

    A subclass of `torch.Tensor` may compute when it is first looked at, so only the class itself is a result. Device
    and dtype are those of the input `like`.
    """
    if not isinstance(result, torch.Tensor):
        return f"{name} is no torch.Tensor but of type {_type_name(result)}"
    if type(result) is not torch.Tensor:
        return f"{name} is of type {_type_name(result)}, a subclass of torch.Tensor, which may compute when it is read"
    if tuple(result.shape) != shape:
        return f"the shape of {name} is {tuple(result.shape)}, not {shape}"
    if result.device != like.device:
        return f"{name} is on {result.device}, not on {like.device}"
    if result.layout != torch.strided:
        return f"the layout of {name} is {result.layout}, not torch.strided"
    if result.is_conj() or result.is_neg():
        return f"{name} is a view with a conjugation or a sign that is not computed yet"
    coded = like.dtype == torch.float8_e4m3fn
    if coded and result.dtype in _OF_CODES:
        return None
    if result.dtype != like.dtype:
        return f"the dtype of {name} is {_dtype_name(result.dtype)}, not {_dtype_name(like.dtype)}"
    if coded and name not in scales:
        return f"{name} is in codes without a scale"
    return None


def _type_name(result: object) -> str:
    return f"{type(result).__module__}.{type(result).__qualname__}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
