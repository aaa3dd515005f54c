"""The fields of cases as tables, files and command lines name them."""

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from attn_exp.core.case.case import TYPED_DTYPES, Case
from attn_exp.core.case.masks import KINDS, Numbered
from attn_exp.core.case.packed import typed_lengths

# The fields that `Case.mask` names in one word.
MASK_FIELDS = ("causal", *KINDS)
# Features that a case has or lacks, such as a sink.
SWITCHES = ("sink", "alibi", "latent")


@cache
def case_columns() -> tuple[str, ...]:
    """Return the names of a case's fields in the order of tables and files."""
    return tuple(field.name for field in fields(Case))


def with_mask(cases: Iterable[Case]) -> bool:
    """Return whether cases differ in more of their masks than causal or not: each mask is best named as a whole.

    Cases whose masks differ in only a number, as windows do, are best told apart by that number.
    """
    return len({type(case.mask) if isinstance(case.mask, Numbered) else None for case in cases}) > 1


def typed_fields(case: Case, *, square: bool) -> dict[str, Any]:
    """Return a case's fields as a command line has them: `dtype` bf16, and if `square` one `seq_len` for both lengths.

    Packed sequences are one word, such as 2q2k_32q1s1k, with the keys that they have.

    Files and records have the fields of `case_columns`, and PyTorch's names of dtypes.
    """
    values = {name: getattr(case, name) for name in case_columns() if not (square and name == "kv_len")}
    # A feature that the case lacks is None.
    values |= {"dtype": TYPED_DTYPES[case.dtype], **{name: getattr(case, name) or None for name in SWITCHES}}
    if case.lengths is not None:
        values |= {"lengths": typed_lengths(case.lengths, case.kv_lengths), "kv_lengths": None}
    return {"seq_len" if square and name == "q_len" else name: value for name, value in values.items()}
