"""Write into a job's record what was judged."""

from collections.abc import Mapping
from typing import Literal

import torch

from attn_exp.attention.expected import Expected
from attn_exp.attention.verdict import Verdict
from attn_exp.core.judged import Form, Judged
from attn_exp.worker.attempt import Attempt


def form_of(tensor: torch.Tensor) -> Form:
    """Return dtype, shape and strides of a tensor."""
    return Form(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), strides=tensor.stride())


def pass_of(name: str) -> str:
    """Return the pass that makes a tensor."""
    return "forward" if name == "out" else "backward"


def add_judged(
    attempt: Attempt,
    call: Literal["first", "hard", "alone", "drawn", "last", "again"],
    forms: Mapping[str, Form],
    expected: Expected,
    made: Verdict,
    inputs: str,
    passes: tuple[str, ...] = (),
    *,
    overwritten: bool = False,
    gradients_overwritten: bool = False,
    strides_refused: bool = False,
    strides_kept: bool = False,
    **which: int,
) -> None:
    """Add a call to those that were compared with a reference.

    Args:
        attempt: the job.
        call: which one it was.
        forms: of its results, by name.
        expected: the reference.
        made: the verdict.
        inputs: their distribution, and what was changed in them.
        passes: those that the call was of; by default the ones that make its results.
        overwritten: whether a later forward wrote over its output.
        gradients_overwritten: whether a later backward wrote over gradients.
        strides_refused: whether its backward raised for an output's gradient of other strides.
        strides_kept: whether its backward was wrong for these only after one of the usual strides.
        which: `index` and `of` of a timed call.
    """
    attempt.judged.append(
        Judged(
            call=call,
            passes=passes or tuple(dict.fromkeys(pass_of(name) for name in forms)),
            inputs=inputs,
            largest_score=expected.largest_score,
            rows=made.rows,
            rows_of=made.rows_of,
            heads=made.heads,
            form=dict(forms),
            overwritten=overwritten,
            gradients_overwritten=gradients_overwritten,
            strides_refused=strides_refused,
            strides_kept=strides_kept,
            **which,
        )
    )
