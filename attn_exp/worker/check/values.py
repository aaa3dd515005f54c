"""Check calls on other values than those that are timed: hard, faint and, for a block's attention, normal ones.

Each value set finds mistakes that normal inputs hide (attn_exp/attention/hard_values.py). Around the hard calls lies
what a model does and a benchmark does not: forwards of other layers, and gradients in other layouts.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from attn_exp.attention.contents import Contents, bits_of
from attn_exp.attention.error import tensor_error
from attn_exp.attention.expected import Expected
from attn_exp.attention.formula import seen_keys
from attn_exp.attention.inputs import Inputs, distribution
from attn_exp.attention.reference import reference
from attn_exp.attention.verdict import Verdict, verdict
from attn_exp.backends.base import Calls
from attn_exp.backends.compile import uncompiled
from attn_exp.core.case.case import NORMAL
from attn_exp.core.record.checked import Judged
from attn_exp.core.record.request import Request
from attn_exp.timers.call import synchronize
from attn_exp.worker.attempt import Attempt, Stopped, status_of
from attn_exp.worker.check.form import ResultForm, Results, form_of
from attn_exp.worker.check.layouts import GAPS, OTHER, Layout, gradients_of, is_autograd
from attn_exp.worker.machine.device import FAINT, HARD, Machine

_WHERE = {HARD: "on hard values", FAINT: "on values of which small weights are all", NORMAL: "on normal values"}
_PREFIX = {"alone": "the attention alone, ", "shorter": "with last pages that are not full, "}
_INPUTS = {HARD: "hard values", FAINT: "faint values"}
# A gradient that is read by other strides is off by its norm; on hard values rounding alone may take some percent.
_UNLIKE, _RIGHT = 0.5, 0.1
# Forwards of other layers: enough to overwrite one of two workspaces that alternate.
_BETWEEN = 2


@dataclass(frozen=True)
class _Made:
    """One call of each pass: its results by name, the output with its graph, and what was odd about it."""

    results: Results
    out: torch.Tensor
    layout: Layout | None = None
    overwritten: bool = False
    refused: bool = False


@dataclass(frozen=True)
class ValuesCheck:
    """Calls each pass of an attention once, untimed, on values of a kind.

    `machine` keeps references for other jobs of the same case, `request` is of the attention alone, and `seeded` are
    the inputs that the calls are left with.
    """

    attempt: Attempt
    machine: Machine
    request: Request
    calls: Calls
    contents: Contents
    form: ResultForm
    seeded: Inputs
    call: Literal["hard", "alone", "shorter"] = "hard"

    def check(self, kind: str) -> None:
        """Compare one call of each pass on values of a kind, `NORMAL`, `HARD` or `FAINT`.

        Raises Stopped if a result is inaccurate.
        """
        request = self.request
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            try:
                values, row, expected = self.machine.values_for(
                    request, kind, self.seeded, with_gradients=self.attempt.with_gradients
                )
            except ValueError:
                # If the formula itself is not finite there is no tolerance; the record has no such call then.
                return
        made = self._calls_on(values, OTHER if kind == HARD else None, between=0 if kind == FAINT else _BETWEEN)
        verdict, strides_kept = self._verdict(values, row, expected, made.results), False
        if verdict.wrong and made.layout is not None and _unlike(verdict) and self._right_at_first(values, made.layout):
            made, strides_kept = replace(self._calls_on(values, None), overwritten=made.overwritten), True
            verdict = self._verdict(values, row, expected, made.results)
        wrong = verdict.wrong
        if wrong:
            why = self._why(values, row, expected, made) if self.attempt.with_gradients else None
            wrong = wrong if why is None else f"{why}: {wrong}"
        refused = made.refused
        if kind == HARD and not wrong:
            for layout in (OTHER, GAPS):
                if layout != made.layout and not wrong:
                    wrong, refuses, kept = self._wrong_in(layout, values, row, expected, made)
                    refused, strides_kept = refused or refuses, strides_kept or kept
        forms = {name: form_of(tensor) for name, tensor in made.results.items()}
        overwritten = made.overwritten
        # The memory may not hold another graph beside this one.
        del made
        hides_nan = kind == HARD and not wrong and self._hides_nan()
        self.attempt.judged.append(
            Judged(
                call="faint" if kind == FAINT else self.call,
                passes=("forward", "backward") if self.attempt.with_gradients else ("forward",),
                inputs=_INPUTS.get(kind) or distribution(request.case),
                largest_score=expected.largest_score,
                rows=verdict.rows,
                rows_of=verdict.rows_of,
                heads=verdict.heads,
                form=forms,
                overwritten=overwritten,
                strides_refused=refused,
                strides_kept=strides_kept,
                hides_nan=hides_nan,
            )
        )
        self._write(self.seeded)
        if wrong:
            raise Stopped("inaccurate", f"{_PREFIX.get(self.call, '')}{_WHERE[kind]}: {wrong}")

    def _write(self, values: Inputs) -> None:
        self.contents.write(values)
        synchronize(self.request.device)

    def _calls_on(self, values: Inputs, layout: Layout | None, *, between: int = 0) -> _Made:
        """Call each pass on these values; if autograd computes the backward, with the output's gradient in a layout.

        `between` forwards on the seed's inputs, like those of a model's other layers, must not overwrite memory that
        the backward needs. If they overwrite the output itself, as the replay of a CUDA graph does, the backward
        follows its forward at once.
        """
        refused, overwritten, gradients = False, False, None
        with self.attempt.stage("first_call"):
            # The gradient comes after the forward, as in training.
            self._write(replace(values, d_out_bhsd=self.seeded.d_out_bhsd))
            out = self.calls.forward()
            results = {"out": self.form.results("forward", out)["out"].clone()}
            if between:
                overwritten = self._others_overwrite(out, results["out"], between)
            if self.attempt.with_gradients:
                if overwritten:
                    self._write(values)
                    out = self.calls.forward()
                self._write(values)
                if layout is not None and is_autograd(self.calls.backward):
                    gradients, refused = self._in_layout(out, layout)
                layout = None if gradients is None else layout
                # A backward of the backend's own is called as it is.
                results |= self.form.results("backward", gradients or self.calls.backward(out)())
            synchronize(self.request.device)
        return _Made(results, out, layout, overwritten, refused)

    def _others_overwrite(self, out: torch.Tensor, copy: torch.Tensor, count: int) -> bool:
        """Make forwards on other inputs while an output is alive; return whether they wrote over it."""
        self._write(self.seeded)
        try:
            alive = [self.calls.forward() for _ in range(count)]
            del alive
        except Exception as error:
            if status_of(error, "")[0] != "out_of_memory":
                raise
        try:
            return not torch.equal(bits_of(out.detach()), bits_of(copy))
        except RuntimeError:
            # PyTorch's CUDA graph trees take results back at the next call, and refuse to read them then.
            return True

    def _verdict(self, values: Inputs, row: int, expected: Expected, results: Results) -> Verdict:
        # The gradient of sinks, d_sink, is a sum over the batch.
        of_row = {name: tensor[row : row + 1] for name, tensor in results.items() if name != "d_sink"}
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            return verdict(replace(self.request.case, batch=1), values, expected, of_row, self.calls.scales)

    def _why(self, values: Inputs, row: int, expected: Expected, made: _Made) -> str | None:
        """Return the circumstance (other forwards, a layout) without which the results are right, or None."""
        at_once = self._calls_on(values, made.layout)
        if not made.overwritten and self._verdict(values, row, expected, at_once.results).wrong is None:
            return "a later forward overwrites what the backward of an earlier one needs"
        if made.layout is not None:
            usual = self._calls_on(values, None)
            if self._verdict(values, row, expected, usual.results).wrong is None:
                return f"the backward is wrong where the output's gradient {made.layout.words}"
        return None

    def _wrong_in(
        self, layout: Layout, values: Inputs, row: int, expected: Expected, made: _Made
    ) -> tuple[str | None, bool, bool]:
        """Differentiate an output once more with d_out in a layout.

        Return the mistake, whether the layout was refused, and whether a plan that was kept is the cause.
        """
        if made.overwritten:
            return None, False, False
        gradients, refused = self._in_layout(made.out, layout)
        if gradients is None:
            return None, refused, False
        verdict = self._verdict(values, row, expected, self.form.results("backward", gradients))
        if verdict.wrong is None:
            return None, False, False
        if _unlike(verdict) and self._right_at_first(values, layout):
            return None, False, True
        return f"the backward is wrong where the output's gradient {layout.words}: {verdict.wrong}", False, False

    def _in_layout(self, out: torch.Tensor, layout: Layout) -> tuple[tuple[torch.Tensor, ...] | None, bool]:
        """Return the gradients of an output whose own gradient lies in a layout, and whether it was refused.

        None if there is no such layout, or no memory for it. A backward that raises has computed nothing wrong.
        """
        if not out.requires_grad:
            return None, False
        try:
            d_out = layout.of(self.contents.tensors["d_out"])
            return (None if d_out is None else gradients_of(out, self._read, d_out)), False
        except Exception as error:
            return None, status_of(error, "")[0] != "out_of_memory"

    @property
    def _read(self) -> Inputs:
        assert isinstance(self.calls.inputs, Inputs)
        return self.calls.inputs

    def _right_at_first(self, values: Inputs, layout: Layout) -> bool:
        """Whether the backward is right in this layout of the output's gradient when nothing was called before.

        The case has another number of heads than any that was called before. Then the backward is wrong only after one
        of the usual layout: it keeps a plan whose key lacks the strides, as cuDNN's does.
        """
        attention, case = self.calls.attention, self.request.case
        if attention is None or case.quantised:
            return False
        group = case.q_heads // case.kv_heads
        kv_heads = next(heads for heads in layout.heads if heads != case.kv_heads)
        small = replace(case, batch=1, q_heads=kv_heads * group, kv_heads=kv_heads)
        of_keys = torch.arange(kv_heads, device=values.q_bhsd.device) % case.kv_heads
        of_queries = (of_keys[:, None] * group + torch.arange(group, device=of_keys.device)).flatten()
        q, d_out = (tensor.detach()[:, of_queries] for tensor in (values.q_bhsd, values.d_out_bhsd))
        k, v = (tensor.detach()[:, of_keys] for tensor in (values.k_bhsd, values.v_bhsd))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        inputs, d_out_in_layout = Inputs(q, k, v, d_out, kind=values.kind), layout.of(d_out)
        try:
            with uncompiled():
                grads = None if d_out_in_layout is None else gradients_of(attention(q, k, v), inputs, d_out_in_layout)
        except Exception:
            grads = None
        if grads is None:
            return False
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            right = reference(small, inputs, with_gradients=True)
            errors = [tensor_error(grad, right[name]) for grad, name in zip(grads, inputs.gradient_names, strict=True)]
        return all(error.relative is not None and error.relative < _RIGHT for error in errors)

    def _hides_nan(self) -> bool:
        """Whether a NaN in a row of q leaves that row of the output finite: an overflow would not show.

        Codes of fp8 and int8 are not tried, which have no NaN or round it to a number.
        """
        case = self.request.case
        first, last = seen_keys(case, torch.arange(case.q_len))
        seeing = (last >= first).nonzero().flatten().tolist()
        if case.quantised or not seeing:
            return False
        q = self.seeded.q_bhsd.detach().clone()
        q[0, 0, seeing[-1], 0] = torch.nan
        self._write(replace(self.seeded, q_bhsd=q))
        out = self.form.results("forward", self.calls.forward())["out"]
        return bool(out[0, 0, seeing[-1]].isfinite().all())


def _unlike(verdict: Verdict) -> bool:
    """Whether a gradient has little to do with its reference."""
    gradients = [error.relative for name, error in verdict.errors.items() if name != "out"]
    return any(relative is None or relative > _UNLIKE for relative in gradients)
