"""Judge calls on other values than those that are timed: hard ones, and of attention in a block normal ones, too."""

from dataclasses import dataclass, replace
from random import SystemRandom
from typing import Any, Literal, NamedTuple

import torch

from attn_exp.attention.alike import Alike
from attn_exp.attention.autograd import Gradients
from attn_exp.attention.error import tensor_error
from attn_exp.attention.expected import Expected
from attn_exp.attention.inputs import Inputs, distribution
from attn_exp.attention.reference import reference, reference_forward
from attn_exp.attention.verdict import Verdict, verdict
from attn_exp.backends.base import Calls
from attn_exp.core.case import NORMAL
from attn_exp.core.judged import Form
from attn_exp.core.request import Request
from attn_exp.timers.sync import synchronize
from attn_exp.worker.attempt import Attempt, status_of
from attn_exp.worker.judge.as_in_a_model import GAPS, OTHER, Layout, change_in_place, gradients_of, is_autograd
from attn_exp.worker.judge.between import Between
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.judged import add_judged, form_of
from attn_exp.worker.judge.not_finite import hidden_nan
from attn_exp.worker.judge.timed_pass import Results
from attn_exp.worker.machine.device import HARD, Machine
from attn_exp.worker.stopped import Stopped

# What reasons have.
_ON = {HARD: "on hard values (docs/accuracy.md)", NORMAL: "on normal values"}
# A gradient that is read by other strides is off by its norm; on hard values rounding alone may take some percent.
_UNLIKE, _RIGHT = 0.5, 0.1


@dataclass(frozen=True)
class _MadeCalls:
    """One call of each pass.

    Attributes:
        results: by name, the output as a copy.
        forms: of the results.
        out: the output, with its graph.
        layout: the other layout that the output's gradient lay in, None for the usual one.
        strides_refused: whether the backward raised for that.
    """

    results: Results
    forms: dict[str, Form]
    out: torch.Tensor
    layout: Layout | None
    strides_refused: bool


class _MadeAgain(NamedTuple):
    """What a call after the timing was: its results' forms, the verdict, what is wrong, and as in `_MadeCalls`."""

    forms: dict[str, Form]
    made: Verdict
    wrong: str | None
    layout: Layout | None
    strides_refused: bool


def _described(request: Request, kind: str) -> str:
    return "hard values" if kind == HARD else distribution(request.case, kind)


def _wrong_for(layout: Layout) -> str:
    return f"the backward is wrong where the output's gradient {layout.words}"


def _unlike(made: Verdict) -> bool:
    """Whether a gradient has little to do with its reference."""
    gradients = [error.relative for name, error in made.errors.items() if name != "out"]
    return any(relative is None or relative > _UNLIKE for relative in gradients)


@dataclass(frozen=True)
class OtherValues:
    """Calls each pass of an attention once, untimed, on values of a kind.

    Between a forward and its backward there is another forward on other inputs, as in a model of several layers: what
    the backward needs must not lie where the next forward writes. Where the output itself lies there, as with a CUDA
    graph or a buffer of the backend's own, the record says so, and the backward follows its forward at once.

    Attributes:
        attempt: the job; gets what was judged.
        machine: keeps references for other jobs of the same case.
        request: the job, of the attention alone.
        calls: of the backend.
        judge: changes the inputs.
        seeded: the inputs that the calls are left with.
        call: the calls' name in the record.
    """

    attempt: Attempt
    machine: Machine
    request: Request
    calls: Calls
    judge: Judge
    seeded: Any
    call: Literal["hard", "alone"] = "hard"

    def compare(self, kind: str) -> None:
        """Compare one call of each pass on values of a kind, `NORMAL` or `HARD`.

        Raises:
            Stopped: a result is inaccurate.
        """
        attempt, request = self.attempt, self.request
        with attempt.stage("accuracy"), self.machine.settings.again():
            try:
                alike, row, expected = self.machine.values_for(
                    request, kind, self.seeded, with_gradients=attempt.with_gradients
                )
            except ValueError:
                # Where the formula itself is not finite there is no tolerance; the record has no such call then.
                return
        values, between = alike.inputs, self._between()
        made_calls = self._calls_on(values, between, OTHER if kind == HARD else None)
        results = made_calls.results
        with attempt.stage("accuracy"), self.machine.settings.again():
            made = self._verdict(values, row, expected, results)
        # A block's own backward, which came before, may have had its gradient in another layout than this one.
        may_be_kept = made_calls.layout is not None or self.call == "alone"
        strides_kept = bool(made.wrong) and may_be_kept and _unlike(made) and self._right_at_first(values, OTHER)
        if strides_kept:
            made_calls = self._calls_on(values, None)
            results = made_calls.results
            with attempt.stage("accuracy"), self.machine.settings.again():
                made = self._verdict(values, row, expected, results)
                if made.wrong and self.call == "alone":
                    results = {"out": results["out"]}
                    made = self._verdict(values, row, expected, results)
        with attempt.stage("accuracy"), self.machine.settings.again():
            add_judged(
                attempt,
                self.call,
                made_calls.forms,
                expected,
                made,
                _described(request, kind),
                overwritten=between.overwritten,
                gradients_overwritten=between.gradients_overwritten,
                strides_refused=made_calls.strides_refused,
                strides_kept=strides_kept,
            )
            wrong = made.wrong or alike.wrong_row(row, expected, results, self.calls.scales)
            wrong = wrong or next(iter(between.wrong), None)
        if made.wrong and request.case.softcap is not None and self._uncapped(values.row(row), row, expected, results):
            wrong = f"{wrong}, as if the softcap of {request.case.softcap:g} were left out"
        elif made.wrong and attempt.with_gradients:
            why = self._why(values, row, expected, made_calls, between)
            wrong = wrong if why is None else f"{why}: {wrong}"
        elif wrong is None and kind == HARD and not between.overwritten:
            # Their memory may be needed.
            results.clear()
            wrong = self._wrong_in_the_other_layout(values, row, expected, made_calls)
            wrong = wrong or self._wrong_if_changed(values, row, expected, made_calls.out)
        self.judge.write(self.seeded)
        if wrong:
            raise Stopped("inaccurate", f"{self._alone}{_ON[kind]}: {wrong}")

    def compare_again(self, kind: str) -> None:
        """Compare one call more of each pass on values of a kind with other signs, after the timing.

        What a backend does otherwise from some call on shows on the values that bite. On hard ones the output's
        gradient has gaps in memory, and what is not a number must stay it. Where the memory does not hold another graph
        beside the timed one there is no such call.

        Raises:
            Stopped: a result is inaccurate.
        """
        attempt, request = self.attempt, self.request
        with attempt.stage("accuracy"), self.machine.settings.again():
            try:
                alike, row, expected = self.machine.values_for(
                    request, kind, self.seeded, with_gradients=attempt.with_gradients
                )
            except ValueError:
                # As in `compare`.
                return
            again = alike.with_other_signs(request.case, SystemRandom())
        asked = GAPS if kind == HARD else None
        try:
            forms, made, wrong, layout, refused = self._made_again(alike, again, row, expected, asked)
            strides_kept = False
            if wrong and layout is not None:
                usual = self._made_again(alike, again, row, expected, None)
                strides_kept = _unlike(made) and usual.wrong is None and self._right_at_first(alike.inputs, layout)
                if strides_kept:
                    forms, made, wrong = usual[:3]
                elif usual.wrong is None:
                    wrong = f"{_wrong_for(layout)}: {wrong}"
        except Exception as error:  # whatever does not fit
            if status_of(error, "")[0] != "out_of_memory":
                raise
            return
        finally:
            self.judge.write(self.seeded)
        described = _described(request, kind)
        add_judged(
            attempt, "again", forms, expected, made, described, strides_refused=refused, strides_kept=strides_kept
        )
        if wrong:
            raise Stopped("inaccurate", f"{self._alone}{_ON[kind]}, once more after the timing: {wrong}")
        if kind == HARD:
            self._call_once_more()

    def _made_again(
        self, alike: Alike, again: Alike, row: int, expected: Expected, layout: Layout | None
    ) -> "_MadeAgain":
        """Call each pass on `again`, which has other signs than `alike`, and compare with the reference of that."""
        made_calls = self._calls_on(again.inputs, None, layout)
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            results = again.turned(made_calls.results, alike)
            made = self._verdict(alike.inputs, row, expected, results)
            wrong = made.wrong or alike.wrong_row(row, expected, results, self.calls.scales)
        return _MadeAgain(made_calls.forms, made, wrong, made_calls.layout, made_calls.strides_refused)

    def _call_once_more(self) -> None:
        """Compare a forward on rare rows, and a call of each pass on what is not a number, after the timing.

        Where the memory does not hold another graph there are no such calls.

        Raises:
            Stopped: a result is inaccurate.
        """
        between = self._between()
        try:
            between.run_one()
            if between.wrong:
                raise Stopped("inaccurate", f"{self._alone}after the timing: {between.wrong[0]}")
            hidden = hidden_nan(
                self.request.case, self.calls, self.judge, self.seeded, with_gradients=self.attempt.with_gradients
            )
            if hidden:
                raise Stopped("inaccurate", f"{self._alone}after the timing: {hidden}")
        except Exception as error:  # whatever does not fit
            if status_of(error, "")[0] != "out_of_memory":
                raise
        finally:
            self.judge.write(self.seeded)

    def _verdict(self, values: Inputs, row: int, expected: Expected, results: Results) -> Verdict:
        # That of sinks is the sum over the batch.
        of_row = {name: tensor[row : row + 1] for name, tensor in results.items() if name != "d_sink"}
        return verdict(replace(self.request.case, batch=1), values.row(row), expected, of_row, self.calls.scales)

    def _uncapped(self, values: Inputs, row: int, expected: Expected, results: Results) -> bool:
        """Whether the output of a row of the batch is right without the case's softcap."""
        case = replace(self.request.case, batch=1, softcap=None)
        with self.machine.settings.again():
            error = tensor_error(
                results["out"][row : row + 1], reference_forward(case, values), self.calls.scales.get("out", 1.0)
            )
        return error.relative is not None and error.relative <= (expected.tolerances["out"].relative or 0.0)

    def _why(self, values: Inputs, row: int, expected: Expected, made: _MadeCalls, between: Between) -> str | None:
        """Return what makes the gradients wrong if they are right without it, or None."""
        if not between.overwritten:
            at_once = self._calls_on(values, None, made.layout).results
            if self._verdict(values, row, expected, at_once).wrong is None:
                return "a later forward overwrites what the backward of an earlier one needs"
        if made.layout is not None:
            usual = self._calls_on(values, None).results
            if self._verdict(values, row, expected, usual).wrong is None:
                return _wrong_for(made.layout)
        return None

    def _wrong_in_the_other_layout(self, values: Inputs, row: int, expected: Expected, made: _MadeCalls) -> str | None:
        """Return what is wrong with gradients in the other layout, if the backend's own backward was called before."""
        if made.layout is not None or made.strides_refused or not made.out.requires_grad:
            return None
        found = self._in_layout(made.out, OTHER)[0]
        if found is None:
            return None
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            wrong = self._verdict(values, row, expected, self.judge.results("backward", found)).wrong
        if wrong and self._right_at_first(values, OTHER):
            self.attempt.judged[-1] = replace(self.attempt.judged[-1], strides_kept=True)
            return None
        return wrong and f"{_wrong_for(OTHER)}: {wrong}"

    def _right_at_first(self, values: Inputs, layout: Layout) -> bool:
        """Whether the first backward of a case is right if the output's gradient lies in another layout.

        The case has another number of heads than any that was called before, two or three of those there are.
        """
        attention, case = self.calls.attention, self.request.case
        if attention is None or case.quantised:
            return False
        group, kv_heads = case.q_heads // case.kv_heads, 3 if case.kv_heads == 2 else 2
        fewer = replace(case, q_heads=kv_heads * group, kv_heads=kv_heads)
        of_keys = torch.arange(kv_heads, device=values.q_bhsd.device) % case.kv_heads
        of_queries = (of_keys[:, None] * group + torch.arange(group, device=of_keys.device)).flatten()
        q, d_out = (tensor.detach()[:, of_queries] for tensor in (values.q_bhsd, values.d_out_bhsd))
        k, v = (tensor.detach()[:, of_keys] for tensor in (values.k_bhsd, values.v_bhsd))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        inputs, other = Inputs(q, k, v, d_out, kind=values.kind), layout.of(d_out)
        try:
            found = None if other is None else gradients_of(attention(q, k, v), inputs, other)
        except Exception:
            found = None
        if found is None:
            return False
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            known = reference(fewer, inputs, with_gradients=True)
            errors = [tensor_error(one, known[name]) for one, name in zip(found, inputs.gradient_names, strict=True)]
        return all(error.relative is not None and error.relative < _RIGHT for error in errors)

    def _wrong_if_changed(self, values: Inputs, row: int, expected: Expected, out: torch.Tensor) -> str | None:
        """Change an output in place, as a model may, and return what is wrong with its backward then, or None.

        PyTorch raises if a tensor was changed that was saved for the backward.
        """
        if not out.requires_grad:
            return None
        change_in_place(out)
        try:
            gradients = self.judge.results("backward", self.calls.backward(out)())
        except Stopped:
            raise
        except Exception:
            return None
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            wrong = self._verdict(values, row, expected, gradients).wrong
        return wrong and f"an output that is changed in place after its forward spoils the gradients silently: {wrong}"

    def _calls_on(self, values: Inputs, between: Between | None, layout: Layout | None = None) -> _MadeCalls:
        """Call each pass on these values.

        Args:
            values: what the calls read.
            between: gets what calls between find; None for none of them.
            layout: how the output's gradient shall lie, where autograd can be asked.
        """
        attempt, refused = self.attempt, False
        # The gradient comes after the forward, as in training: what a forward computes of another one is wrong.
        unknown = replace(values, d_out_bhsd=self.seeded.d_out_bhsd)
        self.judge.write(unknown)
        with attempt.stage("first_call"):
            out = self.calls.forward()
            made = self.judge.results("forward", out)
            results = {"out": made["out"].clone()}
            if between is not None:
                between.run(made["out"], results["out"])
            if attempt.with_gradients:
                if between is not None and between.overwritten:
                    self.judge.write(unknown)
                    out = self.calls.forward()
                self.judge.write(values)
                # A backward of the backend's own, around autograd's or not, is called as it is.
                gradients = None
                if layout is not None and is_autograd(self.calls.backward):
                    gradients, refused = self._in_layout(out, layout)
                layout = None if gradients is None else layout
                made |= self.judge.results("backward", gradients or self.calls.backward(out)())
            synchronize(self.request.device)
        forms = {name: form_of(tensor) for name, tensor in made.items()}
        return _MadeCalls(made | results, forms, out, layout if attempt.with_gradients else None, refused)

    def _in_layout(self, out: torch.Tensor, layout: Layout) -> tuple[Gradients | None, bool]:
        """Return the gradients of an output whose own gradient lies in a layout, and whether it was refused.

        None if it was, if the backward is not autograd's, or where the memory does not hold another gradient.
        """
        if not out.requires_grad:
            return None, False
        try:
            d_out = layout.of(self.judge.fresh.tensors["d_out"])
            return (None if d_out is None else gradients_of(out, self.judge.read, d_out)), False
        except Exception as error:
            return None, status_of(error, "")[0] != "out_of_memory"

    @property
    def _alone(self) -> str:
        return "the attention alone, " if self.call == "alone" else ""

    def _between(self) -> Between:
        return Between(self.attempt, self.machine, self.request, self.calls, self.judge, self.seeded)
