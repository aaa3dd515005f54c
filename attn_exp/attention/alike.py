"""Rows of a batch that are alike: all have the numbers of one row, but for signs.

Changing the signs of the same channels of q and k changes no score, and changing those of v and of the output's
gradient changes those of the output and of dv. So one reference judges one row, and the others are compared with it:
what is wrong in only one row of the batch shows, in gradients, too. No two rows need be equal, so that a row that is
taken for another shows as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from attn_exp.attention.expected import Expected
from attn_exp.attention.fresh_inputs import flip_rows
from attn_exp.attention.hard_values import draw
from attn_exp.attention.inputs import Inputs, Scales, make_inputs, quantised
from attn_exp.core.case import NORMAL, Case
from attn_exp.core.text import apart

# Both rows may be off by a tolerance, but a lost row is not within this share. Of the plain and the fused formula,
# PyTorch's kernels and the fp8 formula on a CPU, rows of 1,000 random cases differed by at most a tenth of the bound.
_BOTH, _MOST = 2.0, 0.5
# Numbers that are compared at once: 256 MiB in float32.
_MOST_NUMBERS = 1 << 26


@dataclass(frozen=True)
class Alike:
    """Inputs whose rows of the batch are alike.

    Attributes:
        inputs: the whole batch.
        signs: the bits of the channels whose signs are changed, of each row of the batch: those of q and k, and those
            of v and d_out.
    """

    inputs: Inputs
    signs: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, row: Inputs, like: Inputs, case: Case, dice: Random) -> "Alike":
        """Repeat a row of the batch in the shapes and layout of `like`, with signs of its own each time."""
        of_scores, of_values = signs = _signs(case, dice)

        def repeated(one: torch.Tensor, whole: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
            tensor = torch.empty_like(whole.detach())
            tensor.copy_(one.detach())
            flip_rows(tensor, bits)
            return tensor

        made = Inputs(
            repeated(row.q_bhsd, like.q_bhsd, of_scores),
            repeated(row.k_bhsd, like.k_bhsd, of_scores),
            repeated(row.v_bhsd, like.v_bhsd, of_values),
            repeated(row.d_out_bhsd, like.d_out_bhsd, of_values),
            row.scales,
            row.kind,
        )
        return cls(made, signs)

    def with_other_signs(self, case: Case, dice: Random) -> "Alike":
        """Return copies of these inputs with other signs."""
        one, signs = self.inputs, _signs(case, dice)
        tensors = {"q": one.q_bhsd, "k": one.k_bhsd, "v": one.v_bhsd, "d_out": one.d_out_bhsd}
        q, k, v, d_out = self.turned(tensors, Alike(one, signs)).values()
        return Alike(Inputs(q, k, v, d_out, one.scales, one.kind), signs)

    def turned(self, tensors: Mapping[str, torch.Tensor], other: "Alike") -> dict[str, torch.Tensor]:
        """Return copies of these inputs, or of results on them, as they are with another one's signs."""
        turned = {name: tensor.detach().clone() for name, tensor in tensors.items() if name != "d_sink"}
        for name, tensor in turned.items():
            which = _which(name)
            flip_rows(tensor, [one ^ two for one, two in zip(self.signs[which], other.signs[which], strict=True)])
        return turned

    @torch.no_grad()
    def wrong_row(
        self, row: int, expected: Expected, results: Mapping[str, torch.Tensor], scales: Mapping[str, float]
    ) -> str | None:
        """Return which row of the batch has other results than one that was judged as a sentence, or None.

        Args:
            row: the row of the batch that was compared with a reference.
            expected: the reference of that row, whose tolerances hold for the others.
            results: the call's tensors by name.
            scales: the factors of those that are codes.
        """
        for name, tensor in results.items():
            if name == "d_sink":
                # It is the sum over the batch.
                continue
            bits = self.signs[_which(name)]
            wrong = _unlike(name, tensor.detach(), bits, row, expected, scales.get(name, 1.0))
            if wrong is not None:
                return wrong
        return None


def _signs(case: Case, dice: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the signs of each row of the batch: of the channels of q and k, and of those of v and d_out."""
    dims = (case.head_dim, case.value_dim)
    of_scores, of_values = (tuple(dice.getrandbits(dim) for _ in range(case.batch)) for dim in dims)
    return of_scores, of_values


def _which(name: str) -> int:
    """Return which of both signs a tensor of the inputs or of the results has."""
    return 0 if name in ("q", "k", "dq", "dk") else 1


def alike_inputs(kind: str, case: Case, like: Inputs, seed: int) -> Alike:
    """Return inputs of a kind whose rows of the batch are alike, of the shapes, layout, dtype and scales of `like`.

    They need no gradients: copy them into tensors that do.

    Args:
        kind: `NORMAL`, or a kind of hard values.
        case: the problem.
        like: inputs of the case.
        seed: of the numbers and of the signs.
    """
    one, device = replace(case, batch=1), like.q_bhsd.device
    if kind == NORMAL:
        row = make_inputs(one, device.type, seed, with_gradients=False)
        row = row if like.scales is None else _with_scales(row, like.scales)
    else:
        row = draw(kind, one, torch.Generator(device).manual_seed(seed), like=like.row(0))
    return Alike.of(row, like, case, Random(seed))


def _with_scales(inputs: Inputs, scales: Scales) -> Inputs:
    numbers = inputs.numbers()

    def codes(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return quantised(tensor, scale).codes

    q, k, v = numbers.qkv
    return Inputs(
        codes(q, scales.q), codes(k, scales.k), codes(v, scales.v), codes(numbers.d_out_bhsd, scales.d_out), scales
    )


def _unlike(
    name: str, tensor: torch.Tensor, bits: tuple[int, ...], row: int, expected: Expected, scale: float
) -> str | None:
    """Return which row of the batch of a tensor is unlike row `row` as a sentence, or None."""
    bounds, typical = expected.tolerances[name], expected.typical_norm(name)
    known = tensor[row : row + 1].float() * scale
    norm = known.norm(dim=-1) / typical
    step = max(1, _MOST_NUMBERS // known.numel())
    figures = []
    for begin in range(0, len(tensor), step):
        some = tensor[begin : begin + step].clone()
        # As the judged row has them.
        flip_rows(some, [one ^ bits[row] for one in bits[begin : begin + step]])
        off = (some.float() * scale - known).norm(dim=-1) / typical
        parts = [
            off.square().mean((1, 2)).sqrt(),
            (off / norm.clamp(min=1.0)).amax((1, 2)),
            (off / norm.clamp(min=bounds.small)).amax((1, 2)),
        ]
        figures.append(torch.stack(parts))
    allowed = (min(_BOTH * bounds.relative, max(_MOST, bounds.relative)), _BOTH * bounds.worst_row, bounds.own_row)
    for what, found, most in zip(("", "a row of ", "a row of "), torch.cat(figures, -1).tolist(), allowed, strict=True):
        for batch, error in enumerate(found):
            if most is None or error <= most:
                continue
            if not error < float("inf"):
                return f"{name} of row {batch} of the batch has values that are not finite"
            of, at_most = apart(error, most)
            return (
                f"{what}{name} in row {batch} of the batch is off by {of} of its norm from row {row}, which has the "
                f"same inputs but for signs, allowed is {at_most}"
            )
    return None
