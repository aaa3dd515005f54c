"""What a record says about correctness: the calls that were judged, and the errors of their tensors."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """The error of one tensor against the float32 reference. None stands for a value that is not finite.

    Attributes:
        relative: |x - ref| / |ref| (Euclidean norms).
        worst_row: the same for the worst row along the last dimension, relative to the larger of that row's norm and
            the root-mean-square row norm; of dq also of the norm that rows have on average whose queries see as many
            keys.
        max_abs: the largest difference.
        tolerance: the bound on `relative`, None if nothing was checked.
        row_tolerance: the bound on `worst_row`, None if nothing was checked.
        own_row: the same as `worst_row`, relative to each row's own norm; None if it is not checked.
        own_row_tolerance: the bound on `own_row`.
        worst_tile: |x - ref| / |ref| of the worst tile of 64 rows, or of its rows that were looked at.
        tile_tolerance: the bound on `worst_tile`.
        bias: <x, ref> / <ref, ref> - 1 of the head where it is furthest beyond its noise.
        bias_tolerance: the bound on the magnitude of `bias`.
        least_row: the least <x, ref> / <ref, ref> of a row that is not small: 1 if it is right, 0 if it is lost.
        least_row_tolerance: the least `least_row` that is allowed.
        worst_position: |x - ref| / |ref| of the worst position's rows in all heads together.
        position_tolerance: the bound on `worst_position`.
        position_bias: <x - ref, ref> / <ref, ref> of the rows of a position where it is largest, as a root mean square
            over all heads.
        position_bias_tolerance: the bound on `position_bias`.
        where: of what is beyond its bound, the place, by field.
    """

    relative: float | None
    worst_row: float | None
    max_abs: float | None
    tolerance: float | None = None
    row_tolerance: float | None = None
    own_row: float | None = None
    own_row_tolerance: float | None = None
    worst_tile: float | None = None
    tile_tolerance: float | None = None
    bias: float | None = None
    bias_tolerance: float | None = None
    least_row: float | None = None
    least_row_tolerance: float | None = None
    worst_position: float | None = None
    position_tolerance: float | None = None
    position_bias: float | None = None
    position_bias_tolerance: float | None = None
    where: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The form of a result: its dtype, shape and strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One call whose results were compared with the reference.

    Attributes:
        call: `first`, on the inputs of the seed; `hard`, on hard values; `alone`, of a block's attention without the
            block; `drawn`, a timed call that was chosen at random; `last`, one more call as the timer makes it;
            `again`, after the timing, on hard values; of a block's attention without the block, on normal ones, too.
        passes: the passes whose results were compared.
        index: which timed call of the pass it was, from 1 on; None for the others.
        of: how many calls the timer made of that pass by then.
        inputs: the distribution of the inputs, and what was changed in them.
        largest_score: the largest absolute score that the reference saw, before a softcap; None for a block.
        rows: how many rows of all compared tensors, of `rows_of`, were looked at.
        heads: in how many heads, those of every row of the batch; 0 for a block, which has none.
        form: of each compared tensor.
        overwritten: whether a later forward wrote over the output, as a CUDA graph's replay does; it is known of `hard`
            and `alone`.
        gradients_overwritten: whether a later backward wrote over gradients that were returned: who adds those of two
            backwards has to copy the first ones. It is known of the same calls, not at fp8 nor of few channels.
        strides_refused: whether the backward raised where the output's gradient lay in the other layout, `bshd` or
            `bhsd`, as a model may leave it. It is known of the same calls, of a backward by autograd; of `again` it is
            said of a gradient whose neighbours along a row are not adjacent in memory.
        strides_kept: whether the backward was wrong there only because it had been called for the usual layout before:
            it keeps a plan whose key lacks the strides.
    """

    call: Literal["first", "hard", "alone", "drawn", "last", "again"]
    passes: tuple[str, ...]
    inputs: str
    index: int | None = None
    of: int | None = None
    largest_score: float | None = None
    rows: int = 0
    rows_of: int = 0
    heads: int = 0
    form: dict[str, Form] = field(default_factory=dict)
    overwritten: bool = False
    gradients_overwritten: bool = False
    strides_refused: bool = False
    strides_kept: bool = False
