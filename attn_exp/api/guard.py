"""Guard functions of one's own: fail if one is slower than another, or wrong. Imports nothing heavy before a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from attn_exp.api.guarded import Given, Guarded
    from attn_exp.api.timed import Timed


class UndecidedWarning(UserWarning):
    """Whether a function is slower was not decided, and `undecided="warn"` asked for a warning."""


def assert_not_slower(
    function: Callable[..., torch.Tensor],
    case: Given,
    *,
    than: Callable[..., torch.Tensor],
    margin: float | str = "3%",
    undecided: Literal["fail", "warn"] = "fail",
    causal: bool = False,
    align: str | None = None,
    scale: float | None = None,
    reference: Callable[..., torch.Tensor] | None = None,
    passes: Sequence[str] | None = None,
    **choices: Any,
) -> Guarded:
    """Fail if `function(q, k, v)` is slower than another function by a margin, as a duel in this process decides.

    Both are judged as `attn_exp.time` does, and measured in turns, one block each (ABBA), so that a drift of the
    machine meets both. In each pass it is slower if the mean ratio is at least the margin and beyond chance (at 1 %).
    It is not slower if the whole 95 % interval of the ratio is below the margin; else that is undecided. If other
    programs used the machine, equal functions may differ by 25 %, so a difference decides only if it exceeds that, too.

    Args:
        function: takes q, k and v, and returns a tensor (batch, q_heads, q_len, value_dim) of their dtype.
        case: q, k and v; or a case in the keys of `attn-exp run`, as text (`"batch=2 seq_len=512 causal=true"`) or a
            mapping. Its tensors are drawn at random, on the GPU if there is one (`device=cpu`).
        than: the function to compare with, of the same arguments.
        margin: the smallest difference that counts, as a share (0.03) or text (`"3%"`). The least is the difference of
            equal functions that `attn-exp doctor` measured.
        undecided: whether it is a failure (`fail`) or a warning (`warn`) that nothing is decided.
        causal: whether a query sees only keys up to its own. A case says it itself.
        align: the alignment of a causal mask if q_len is not kv_len, `top_left` by default. A case says it itself.
        scale: the factor of the scores, 1 / sqrt(head_dim) by default.
        reference: the right function, if it is not attention, as for `attn_exp.time`.
        passes: some of `forward`, `backward` and `step`; by default the forward, and the backward if a tensor requires
            gradients.
        **choices: how to measure, as for `attn_exp.time`: `stopping={"budget_s": 30}`. By default a pass takes up to
            5 s.

    Returns:
        The ratio of each pass with its interval; `print` shows the sentences.

    Raises:
        AssertionError: it is slower, or undecided, or one of the two is wrong or fails; the message is one sentence.
        UserError: an argument is no margin, case or choice.

    Example:
        ```python
        attn_exp.assert_not_slower(mine, (q, k, v), than=scaled_dot_product_attention, margin="3%")
        ```
    """
    __tracebackhide__ = True
    from attn_exp.api.guarded import guarded
    from attn_exp.api.timed import Asked

    asked = Asked(causal=causal, align=align, scale=scale, reference=reference, passes=passes, choices=choices)
    found = guarded(function, than, case, asked, margin=margin, undecided=undecided)
    if found.verdict == "slower" or (found.verdict == "undecided" and undecided == "fail"):
        raise AssertionError(str(found))
    if found.verdict == "undecided":
        import warnings

        warnings.warn(str(found), UndecidedWarning, stacklevel=2)
    return found


def assert_correct(
    function: Callable[..., torch.Tensor],
    case: Given,
    *,
    causal: bool = False,
    align: str | None = None,
    scale: float | None = None,
    reference: Callable[..., torch.Tensor] | None = None,
    passes: Sequence[str] | None = None,
    **choices: Any,
) -> Timed:
    """Fail unless `function(q, k, v)` is right, as the judge of `attn_exp.time` finds.

    The results of its first call, of timed calls and of calls on other values are compared with float32
    (`docs/checks.md`). The arguments are those of `assert_not_slower`; it is timed briefly.

    Returns:
        The result of `attn_exp.time`.

    Raises:
        AssertionError: it is not right, or it raises; the message is one sentence.
        UserError: an argument is no case or choice.
    """
    __tracebackhide__ = True
    from attn_exp.api.guarded import judged
    from attn_exp.api.timed import Asked

    asked = Asked(causal=causal, align=align, scale=scale, reference=reference, passes=passes, choices=choices)
    found = judged(function, case, asked)
    if found.status != "ok":
        case_label = found.record.request.case.label()
        raise AssertionError(f"{found.result.label} is {found.status} on {case_label}: {found.reason}")
    return found
