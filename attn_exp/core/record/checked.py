"""Correctness in a record: the calls that were checked, and the errors of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# The changes between compared results, in the order in which they are measured and reported.
WAYS = {
    "calls": "over calls",
    "positions": "over positions in the batch",
    "batch_sizes": "over batch sizes",
    "phases": "over decoding, chunks and prefill",
}
# Calls of each pass on the same inputs, and the seconds after which no further result of a job is compared.
CALLS, BUDGET_S = 100, 120.0
# The ways that make a backend batch-invariant.
OF_THE_BATCH = ("positions", "batch_sizes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ulps:
    """The error of one tensor in units in the last place: the dtype's epsilon times the tensor's root mean square.

    Attributes:
        rms: the root mean square.
        rms_half_width: half of its 95 % confidence interval over heads; None of a single one.
        mean: the mean, positive where numbers are too far from zero.
        mean_half_width: half of its 95 % confidence interval.
    """

    rms: float
    rms_half_width: float | None
    mean: float
    mean_half_width: float | None


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
        ulps: the error in units in the last place, with `gold=float64`.
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
    ulps: Ulps | None = None


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
        call: `first`, on the inputs of the seed; `hard` and `faint`, on other values; `free`, with NaN in memory that
            no request has; `shorter`, of requests whose last page is not full; `alone`, of a block's attention without
            the block; `timed`, the last call of a block that was timed. Records of method 3 and before have
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

    call: Literal["first", "hard", "faint", "free", "shorter", "alone", "timed", "drawn", "last", "again"]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first element whose bits differ between two results of one tensor; `value` and `usual` have their bits.

    Of the tensor's `elements_of` elements `elements` differ; `max_abs` is the largest difference, None if not finite.
    """

    result: str
    tensor: str
    index: tuple[int, ...]
    value: str
    usual: str
    elements: int
    elements_of: int
    max_abs: float | None

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        by = "" if self.max_abs is None else f", by {self.max_abs:.3g} at most"
        return (
            f"{self.result}: {self.tensor}[{place}] is {self.value} and not {self.usual}; "
            f"{self.elements:,} of {self.elements_of:,} elements differ{by}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bitwise:
    """Whether results of one pass have the same bits as the first one: of `compared` results, `differing` have not.

    `same` is None if it is not known, as where no other batch fits into the memory; `why` then says the reason.
    """

    same: bool | None
    compared: int = 0
    differing: int = 0
    first: Difference | None = None
    why: str | None = None

    @property
    def word(self) -> str:
        """Return `yes`, `no` or `not known`."""
        return "not known" if self.same is None else yes_or_no(self.same)

    def __str__(self) -> str:
        if self.first is not None:
            return f"{self.word} ({self.differing:,} of {self.compared:,} differ; {self.first})"
        return f"{self.word} ({self.why})" if self.why else f"{self.word} ({self.compared:,} compared)"


def yes_or_no(value: float) -> str:
    """Return the word for a fact."""
    return "yes" if value else "no"


def holds(known: Mapping[str, Bitwise], *ways: str) -> float | None:
    """Return 1.0 if results have the same bits in all of these ways that were measured, 0.0 if in one they do not.

    None if none of them was measured, or one is not known and the others hold.
    """
    facts = [known[way].same for way in ways if way in known]
    if False in facts:
        return 0.0
    return None if not facts or None in facts else 1.0


def told(known: Mapping[str, Bitwise]) -> str:
    """Return all facts of a pass in words, in the order of `WAYS`."""
    return "; ".join(f"{words} {known[way]}" for way, words in WAYS.items() if way in known)
