"""Correctness in a record: the calls that were checked, and the errors of their tensors."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """The error of one tensor against the float32 reference. None stands for a value that is not finite.

    Attributes:
        relative: |x - ref| / |ref| (Euclidean norms).
        worst_row: the error of the worst row along the last dimension, relative to the larger of that row's norm and
            the root-mean-square row norm. For dq, the mean norm of rows whose queries see as many keys counts as well.
        max_abs: the largest absolute difference.
        tolerance: the bound on `relative`, None if nothing was checked.
        row_tolerance: the bound on `worst_row`, None if nothing was checked.
        own_row: the error of the worst row relative to each row's own norm; None if it is not checked.
        own_row_tolerance: the bound on `own_row`.
        worst_tile: |x - ref| / |ref| of the worst tile of 64 rows, or of its rows that were looked at.
        tile_tolerance: the bound on `worst_tile`.
        where: the place of each error beyond its bound, by field.
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
        call: `first`, on the inputs of the seed; `hard` and `faint`, on other values; `alone`, of a block's attention
            without the block; `timed`, the last call of a block that was timed. Records of method 3 and before have
            `drawn`, `last` and `again` in its place.
        passes: the passes whose results were compared.
        index: the number of the timed block within the pass, from 1 on; None for the others.
        inputs: the distribution of the inputs, and what was changed in them.
        largest_score: the largest absolute score that the reference saw, before a softcap; None for a block.
        rows: the number of rows that were checked, of `rows_of` in all compared tensors.
        heads: the number of checked heads in all rows of the batch; 0 for a block, which has none.
        form: the form of each compared tensor.
        overwritten: whether a later forward wrote over the output, as a CUDA graph's replay does; it is known of `hard`
            and `alone`, as what follows is.
        strides_refused: whether the backward raised where the output's gradient lay in the other layout, `bshd` or
            `bhsd`, or had gaps between neighbours, as a model may leave it.
        strides_kept: whether the backward was wrong there only because it had been called for the usual layout before:
            it keeps a plan whose key lacks the strides.
        hides_nan: whether a NaN in a row of q left that row of the output finite.
    """

    call: Literal["first", "hard", "faint", "alone", "timed", "drawn", "last", "again"]
    passes: tuple[str, ...]
    inputs: str
    index: int | None = None
    largest_score: float | None = None
    rows: int = 0
    rows_of: int = 0
    heads: int = 0
    form: dict[str, Form] = field(default_factory=dict)
    overwritten: bool = False
    strides_refused: bool = False
    strides_kept: bool = False
    hides_nan: bool = False
