"""The checks of one job, in order: the first calls, calls on hard values, and after the timing the timed blocks."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_exp.attention.contents import Contents
from attn_exp.attention.expected import Expected
from attn_exp.attention.inputs import DifferentiableInputs, Inputs, distribution
from attn_exp.attention.reference import reference
from attn_exp.attention.tolerance import eager
from attn_exp.attention.verdict import verdict
from attn_exp.backends.base import Calls, calls_of
from attn_exp.core.case.case import GIVEN, NORMAL
from attn_exp.core.record.checked import Judged, TensorError
from attn_exp.worker.attempt import Attempt, Stopped, error_summary, status_of
from attn_exp.worker.check.form import ResultForm, Results, form_of
from attn_exp.worker.check.serving import reads_free_slots
from attn_exp.worker.check.timed import TimedCheck
from attn_exp.worker.check.values import ValuesCheck
from attn_exp.worker.machine.device import FAINT, HARD, Machine
from attn_exp.workloads import workload_of
from attn_exp.workloads.base import Workload


@dataclass
class Check:
    """Compares the calls of one job, or of the block around it, with references, and tells `attempt` what it finds."""

    attempt: Attempt
    machine: Machine
    workload: Workload
    calls: Calls
    inputs: DifferentiableInputs
    timed_blocks: list[TimedCheck] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.contents = Contents(self.calls.inputs or self.inputs, self.machine.signs)
        self.form = ResultForm(self.inputs, self.calls.scales)

    def first(self, results: Results) -> tuple[dict[str, TensorError], str | None]:
        """Compare the first calls' results on the inputs of the seed; return the errors, and what is wrong or None.

        Raises Stopped if the tensors that the backend says its calls read have other numbers, or it wrote into them.
        """
        seeded = self.seeded()
        if other := self.contents.written(seeded):
            raise Stopped("inaccurate", self._unlike_given(other, seeded))
        expected = self._gold(seeded)
        found = verdict(self.attempt.request.case, seeded, expected, results, self.calls.scales)
        self._add("first", results, expected, self._described())
        return found.errors, found.wrong

    def hard(self) -> None:
        """Call each pass on hard values, untimed, and compare; the inputs are then those of the seed again.

        Values that are a block's inputs reach its attention only through projections: that is checked alone. Raises
        Stopped if a result is inaccurate.
        """
        request, seeded = self.attempt.request, self.seeded()
        if request.case.workload is not None:
            self._attention_alone()
        elif isinstance(seeded, Inputs):
            calls = self.calls if self.calls.inputs is not None else replace(self.calls, inputs=self.inputs)
            check = ValuesCheck(self.attempt, self.machine, request, calls, self.contents, self.form, seeded)
            # Boundaries of masks, and the means of heads, are checked on values whose distribution is known.
            kinds = [NORMAL] if request.measuring.inputs == GIVEN else []
            kinds += [HARD] if request.case.quantised else [HARD, FAINT]
            for kind in kinds:
                check.check(kind)
            reads = reads_free_slots(self.attempt, self.calls, self.contents, self.form, self._expected(seeded))
            if (forward := self.attempt.passes.get("forward")) is not None:
                self.attempt.passes["forward"] = replace(forward, reads_free_slots=reads)

    def timed(self, direction: str) -> TimedCheck:
        """Return what keeps rows of timed blocks of a pass."""
        case = self.attempt.request.case
        check = TimedCheck(case, direction, self.contents, self.form, self.calls.scales)
        self.timed_blocks.append(check)
        return check

    def after(self) -> None:
        """Compare what was kept of timed blocks.

        Raises Stopped if a result is inaccurate, or the backend wrote into its inputs.
        """
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            seeded = self.seeded()
            if written := self.contents.written(seeded):
                raise Stopped("inaccurate", f"the backend wrote into its input {written}")
            first = self._expected(seeded)
            for check in self.timed_blocks:

                def whole(inputs: Any, check: TimedCheck = check) -> Expected:
                    gradients = check.direction != "forward"
                    case = self.attempt.request.case
                    return self.workload.expected(case, inputs, with_gradients=gradients, tolerances=first.tolerances)

                wrong = check.wrong(seeded, first, whole)
                for block in check.blocks:
                    described = f"{self._described()}, signs changed"
                    self._add("timed", block.rows, first, described, check.direction, block.number + 1)
                check.kept.clear()
                if wrong:
                    raise Stopped("inaccurate", wrong)

    def seeded(self) -> Any:
        """Return the inputs of the seed, drawn anew."""
        request = self.attempt.request
        return self.workload.make_inputs(
            request.case,
            request.device,
            request.measuring.seed,
            with_gradients=self.attempt.with_gradients,
            kind=request.measuring.inputs,
        )

    def _attention_alone(self) -> None:
        """Check the very function that a block calls, on normal and on hard values of its shapes and layout.

        Hard values do not reach a block's attention, and other layers make up most of its output.
        """
        assert self.calls.alone is not None
        request, case = self.attempt.request, self.attempt.request.case.alone
        if request.compile.mode != "none":
            # In a compiled block the output's gradient may lie otherwise, and cuDNN keeps plans whose key lacks its
            # strides: the block's plan would read wrong memory. Another batch has a plan of its own.
            case = replace(case, batch=case.batch + 1)
        request, measuring = replace(request, case=case), request.measuring
        try:
            with self.attempt.stage("first_call"):
                given, seeded = (
                    workload_of(case).make_inputs(
                        case, self.machine.device, measuring.seed, with_gradients=self.attempt.with_gradients
                    )
                    for _ in range(2)
                )
            calls = calls_of(self.calls.alone, given, self.calls.scope, self.calls.notes)
            contents, form = Contents(given), ResultForm(given, calls.scales)
            check = ValuesCheck(self.attempt, self.machine, request, calls, contents, form, seeded, call="alone")
            for kind in (NORMAL, HARD):
                check.check(kind)
        except Exception as error:
            if status_of(error, "")[0] != "out_of_memory":
                raise
            reason = f"the attention alone, which is checked beside the block: {error_summary(error)}"
            raise Stopped("out_of_memory", reason) from error

    def _unlike_given(self, name: str, seeded: Any) -> str:
        read = self.contents.tensors[name].dtype
        given = dict(zip(self.contents.tensors, (*seeded.operands, seeded.d_out), strict=True))[name].dtype
        form = "does not have the numbers given"
        if read != given:
            read_as, given_as = (str(one).removeprefix("torch.") for one in (read, given))
            form = f"is {read_as}, given was {given_as}: the calls have to read {given_as}, and convert it themselves"
        return f"{name} of the inputs that the calls read {form}"

    def _expected(self, seeded: Any) -> Expected:
        """Return the reference of the inputs of the seed, which the machine keeps."""
        gradients = self.attempt.with_gradients
        return self.machine.expected_for(self.attempt.request, seeded, self.workload, with_gradients=gradients)

    def _gold(self, seeded: Any) -> Expected:
        """Return what the first calls are compared with: the reference, or its rows in float64 or by eager PyTorch.

        The reference keeps what these have not, as `d_sink`. Raises Stopped if eager PyTorch needs more memory than
        there is.
        """
        expected, request, gradients = self._expected(seeded), self.attempt.request, self.attempt.with_gradients
        if request.measuring.gold == "float32":
            return expected
        try:
            if request.measuring.gold == "eager":
                of_eager = eager(request.case, seeded, with_gradients=gradients)
                made = {name: tensor.float() for name, tensor in of_eager.items()}
            else:
                made = reference(request.case, seeded, with_gradients=gradients, precision=torch.float64)
        except torch.OutOfMemoryError as error:
            reason = "gold=eager computes all scores at once: set gold=float32, or shorter lengths"
            raise Stopped("out_of_memory", reason) from error
        places = expected.places
        rows = {name: places[name].of(one) if name in places else one for name, one in made.items()}
        return replace(expected, tensors=expected.tensors | rows)

    def _add(
        self,
        call: Any,
        results: Results,
        expected: Expected,
        inputs: str,
        direction: str = "",
        index: int | None = None,
    ) -> None:
        passes = (direction,) if direction else ("forward", "backward") if len(results) > 1 else ("forward",)
        rows = sum(tensor[..., 0].numel() for tensor in results.values()) if index else expected.rows
        self.attempt.judged.append(
            Judged(
                call=call,
                passes=passes,
                index=index,
                inputs=inputs,
                largest_score=expected.largest_score,
                rows=rows,
                rows_of=expected.rows_of,
                heads=expected.heads,
                form={} if index else {name: form_of(tensor) for name, tensor in results.items()},
            )
        )

    def _described(self) -> str:
        return distribution(self.attempt.request.case, self.attempt.request.measuring.inputs)
