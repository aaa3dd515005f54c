"""Compare the calls of a job with references: the first, one on hard values, and the timed ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_exp.attention.expected import Expected
from attn_exp.attention.inputs import Inputs, distribution
from attn_exp.attention.links import wrong_link
from attn_exp.attention.probe import allowed_error, probe_errors, usual_size
from attn_exp.attention.verdict import Verdict, verdict
from attn_exp.backends.base import Calls
from attn_exp.core.case import GIVEN, NORMAL
from attn_exp.core.judged import Form, TensorError
from attn_exp.core.text import apart
from attn_exp.worker.attempt import Attempt
from attn_exp.worker.judge.attention_alone import judge_attention_alone
from attn_exp.worker.judge.judge import Judge
from attn_exp.worker.judge.judged import add_judged, form_of, pass_of
from attn_exp.worker.judge.other_values import OtherValues
from attn_exp.worker.judge.timed_pass import Results, TimedPass
from attn_exp.worker.machine.device import HARD, Machine
from attn_exp.worker.stopped import Stopped
from attn_exp.workloads.base import Workload


@dataclass(frozen=True)
class Judgements:
    """Compares the calls of one job with references.

    Attributes:
        attempt: the job; gets what was judged.
        machine: keeps references for other jobs of the same case.
        workload: makes inputs and references.
        calls: of the backend, or of the block around it.
        judge: has the results of timed calls.
    """

    attempt: Attempt
    machine: Machine
    workload: Workload
    calls: Calls
    judge: Judge

    def first(self, inputs: Any, seeded: Any, results: Results) -> tuple[dict[str, dict[str, TensorError]], str | None]:
        """Compare the first calls' results, on the inputs of the seed.

        Args:
            inputs: what the backend was given.
            seeded: the same, drawn anew.
            results: of the first call of each pass, by name.

        Returns:
            The errors by pass and tensor, and what is wrong or None.

        Raises:
            Stopped: the tensors that the backend says its calls read have other numbers.
        """
        other = self.judge.fresh.written(seeded)
        if other:
            read = self.judge.fresh.tensors[other].dtype
            given = dict(zip(self.judge.fresh.tensors, (*seeded.operands, seeded.d_out), strict=True))[other].dtype
            form = "does not have the numbers given"
            if read != given:
                read_as, given_as = (str(one).removeprefix("torch.") for one in (read, given))
                form = (
                    f"is {read_as}, given was {given_as}: the calls have to read {given_as}, and convert it themselves"
                )
            raise Stopped("inaccurate", f"{other} of the inputs that the calls read {form}")
        expected = self._expected(inputs)
        made = self._verdict(inputs, expected, results)
        add_judged(self.attempt, "first", _forms(results), expected, made, self._described())
        errors: dict[str, dict[str, TensorError]] = {"forward": {}, "backward": {}}
        for name, error in made.errors.items():
            errors[pass_of(name)][name] = error
        return errors, made.wrong

    def hard(self, seeded: Any) -> None:
        """Call each pass once on hard values, untimed, and compare; the inputs are then `seeded` again.

        Values that are a block's inputs reach its attention only through projections: that is judged alone.

        Raises:
            Stopped: a result is inaccurate.
        """
        if self.attempt.request.case.workload is not None:
            judge_attention_alone(self.attempt, self.machine, self.calls)
            return
        if not isinstance(seeded, Inputs):
            # A reference of the user's own may be of anything.
            return
        request = self.attempt.request
        others = OtherValues(self.attempt, self.machine, request, self.calls, self.judge, seeded)
        if request.measuring.inputs == GIVEN:
            # Boundaries of masks, and the means of heads, are judged on values whose distribution is known.
            others.compare(NORMAL)
        others.compare(HARD)

    def again(self) -> None:
        """Call each pass of an attention, of a block's by itself, once more on hard values, after the timing.

        Raises:
            Stopped: a result is inaccurate.
        """
        request = self.attempt.request
        if request.case.workload is not None:
            judge_attention_alone(self.attempt, self.machine, self.calls, again=True)
            return
        seeded = self.seeded()
        if isinstance(seeded, Inputs):
            OtherValues(self.attempt, self.machine, request, self.calls, self.judge, seeded).compare_again(HARD)

    def timed(self) -> None:
        """Compare the drawn and the last call of each pass with one reference of their inputs.

        Raises:
            Stopped: a result is inaccurate, or the backend wrote into its inputs.
        """
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            seeded = self.seeded()
            written = self.judge.fresh.written(seeded)
            if written:
                raise Stopped("inaccurate", f"the backend wrote into its input {written}")
            kept = self._expected(seeded)
            timed = tuple(self.judge.passes)
            # A step reads other inputs than the forward and backward before it.
            for together in ([name for name in timed if name != "step"], [name for name in timed if name == "step"]):
                if together:
                    self._timed_passes(together, seeded, kept)

    def _timed_passes(self, passes: Sequence[str], seeded: Any, first: Expected) -> None:
        """Compare the timed calls of passes with one reference."""
        case = self.attempt.request.case
        inputs = self.judge.fresh.changed(seeded, self.judge.state(passes[0]))
        expected = self.workload.expected(
            case, inputs, with_gradients=list(passes) != ["forward"], tolerances=first.tolerances
        )
        for direction in passes:
            self._timed_pass(direction, inputs, expected, seeded, first)
            self._look(direction, seeded, first)

    def later(self, told: Mapping[int, str]) -> None:
        """Compare the backwards after the timing that were looked at.

        Args:
            told: what each of them was, by its number.

        Raises:
            Stopped: one is inaccurate.
        """
        if not self.judge.later.probes:
            return
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            seeded = self.seeded()
            first = self._expected(seeded)
            wrong = self._wrong_look("backward", self.judge.later, seeded, first)
        if wrong:
            raise Stopped("inaccurate", f"backward: {told[wrong[0]]} is wrong: {wrong[1]}")

    def _look(self, direction: str, seeded: Any, first: Expected) -> None:
        """Compare what was looked at of other timed calls.

        Raises:
            Stopped: it is inaccurate.
        """
        known = self.judge.passes[direction]
        wrong = self._wrong_look(direction, known, seeded, first) or wrong_link(known.links, first.tolerances)
        if wrong:
            index, why = wrong
            which = f"call {index}" if index else "a call before the timing"
            raise Stopped("inaccurate", f"{direction}: the first call was within tolerance, {which} was not: {why}")

    def _wrong_look(self, direction: str, known: TimedPass, seeded: Any, first: Expected) -> tuple[int, str] | None:
        """Return which call that was looked at is wrong, and what is wrong as a sentence, or None."""
        if not known.probes:
            return None
        name, case = "out" if direction == "forward" else "dq", self.attempt.request.case
        relative = {of: bounds.relative for of, bounds in first.tolerances.items()}
        allowed, usual = allowed_error(relative[name]), usual_size(first.tensors[name])
        errors = probe_errors(case, seeded, known.probes, name, usual)
        for probe, (error, head) in zip(known.probes, errors, strict=True):
            if error > allowed:
                of, at_most = apart(error, allowed)
                rows, where = probe.rows.shape[1], f"head {head % case.q_heads} of batch row {head // case.q_heads}"
                what = "a row" if rows == 1 else f"{rows} rows"
                return (
                    probe.index,
                    f"{what} of {name} in {where}, drawn at random, {'is' if rows == 1 else 'are'} off by {of} of "
                    f"{'its' if rows == 1 else 'their'} norm, allowed is {at_most}",
                )
        summing = self.judge.looks.summing
        return None if summing is None else summing.wrong(known.sums, relative)

    def _timed_pass(self, direction: str, inputs: Any, expected: Expected, seeded: Any, first: Expected) -> None:
        count = self.judge.passes[direction].count
        forward = self.judge.passes.get("forward") if direction == "backward" else None
        # Turned into that of `state()` when the forward was judged; the backward is that of this call.
        out = forward.last.results["out"] if forward is not None and forward.last is not None else None
        for call, kept in self.judge.kept(direction):
            made = self._verdict(inputs, expected, kept.results, out)
            described = f"{self._described()}, signs changed"
            whole = () if direction != "step" else (direction,)
            add_judged(self.attempt, call, kept.forms, expected, made, described, whole, index=kept.index, of=count)
            if made.wrong is None:
                continue
            stale = self._verdict(seeded, first, kept.results).wrong is None
            why = "it is the result of the first call's inputs, which have changed since" if stale else made.wrong
            which = "drawn at random" if call == "drawn" else "after the timing"
            raise Stopped(
                "inaccurate",
                f"{direction}: the first call was within tolerance, call {kept.index} ({which}) was not: {why}",
            )

    def _expected(self, inputs: Any) -> Expected:
        """Return the reference of the inputs of the seed, which the machine keeps."""
        gradients = self.attempt.with_gradients
        return self.machine.expected_for(self.attempt.request, inputs, self.workload, with_gradients=gradients)

    def _verdict(self, inputs: Any, expected: Expected, results: Results, out: torch.Tensor | None = None) -> Verdict:
        return verdict(self.attempt.request.case, inputs, expected, results, self.calls.scales, out)

    def _described(self) -> str:
        return distribution(self.attempt.request.case, self.attempt.request.measuring.inputs)

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


def _forms(results: Results) -> dict[str, Form]:
    return {name: form_of(tensor) for name, tensor in results.items()}
