"""Compare the calls of a job with references: the first, one on hard values, and the timed ones."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from attn_exp.attention.expected import Expected
from attn_exp.attention.inputs import distribution
from attn_exp.attention.probe import allowed_error, probe_errors, sum_errors, usual_size
from attn_exp.attention.verdict import Verdict, verdict
from attn_exp.backends.base import Calls
from attn_exp.core.record import Form, Judged, TensorError
from attn_exp.timers.sync import synchronize
from attn_exp.worker.attempt import Attempt, Stopped
from attn_exp.worker.device import Machine
from attn_exp.worker.judge import Judge, Results, form_of
from attn_exp.worker.other_rows import wrong_in_other_rows
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

    def first(self, inputs: Any, results: Results) -> tuple[dict[str, dict[str, TensorError]], str | None]:
        """Compare the first calls' results, on the inputs of the seed.

        Returns:
            The errors by pass and tensor, and what is wrong or None.

        Raises:
            Stopped: the tensors that the backend says its calls read have other numbers.
        """
        other = self.judge.fresh.written(self._seeded())
        if other:
            raise Stopped("inaccurate", f"{other} of the inputs that the calls read does not have the numbers given")
        expected = self.machine.expected_for(self.attempt.request, inputs, with_gradients=self.attempt.with_gradients)
        made = self._verdict(inputs, expected, results)
        self._add(
            "first",
            results,
            expected,
            made,
            self._described(),
        )
        errors: dict[str, dict[str, TensorError]] = {"forward": {}, "backward": {}}
        for name, error in made.errors.items():
            errors[_pass_of(name)][name] = error
        return errors, made.wrong

    def hard(self) -> None:
        """Call each pass once on hard values, untimed, and compare; the inputs are then those of the seed again.

        Values that are a block's inputs reach its attention only through projections: blocks are not called.

        Raises:
            Stopped: a result is inaccurate.
        """
        request, attempt = self.attempt.request, self.attempt
        if request.case.workload is not None:
            return
        with attempt.stage("accuracy"), self.machine.settings.again():
            try:
                values, row, expected = self.machine.hard_for(request, with_gradients=attempt.with_gradients)
            except ValueError:
                # Where the formula itself is not finite there is no tolerance; the record has no such call then.
                return
            self.judge.fresh.write(values)
            synchronize(request.device)
        with attempt.stage("first_call"):
            out = self.calls.forward()
            results = self.judge.results("forward", out)
            if attempt.with_gradients:
                results |= self.judge.results("backward", self.calls.backward(out)())
            synchronize(request.device)
        with attempt.stage("accuracy"), self.machine.settings.again():
            of_row = {name: tensor[row : row + 1] for name, tensor in results.items()}
            made = verdict(replace(request.case, batch=1), values.row(row), expected, of_row, self.calls.scales)
            self._add("hard", results, expected, made, "hard values")
            wrong = made.wrong or wrong_in_other_rows(
                request.case, values, self.judge.fresh.state, row, expected, results, self.calls.scales
            )
            self.judge.fresh.write(self._seeded())
        if wrong:
            raise Stopped("inaccurate", f"on hard values (docs/accuracy.md): {wrong}")

    def timed(self) -> None:
        """Compare the drawn and the last call of each pass with one reference of their inputs.

        Raises:
            Stopped: a result is inaccurate, or the backend wrote into its inputs.
        """
        request = self.attempt.request
        with self.attempt.stage("accuracy"), self.machine.settings.again():
            seeded = self._seeded()
            written = self.judge.fresh.written(seeded)
            if written:
                raise Stopped("inaccurate", f"the backend wrote into its input {written}")
            inputs = self.judge.fresh.changed(seeded, self.judge.state())
            kept = self.machine.expected_for(request, seeded, with_gradients=self.attempt.with_gradients)
            expected = self.workload.expected(
                request.case,
                inputs,
                with_gradients="backward" in self.judge.passes,
                tolerances=kept.tolerances,
            )
            for direction in self.judge.passes:
                self._timed_pass(direction, inputs, expected, seeded, kept)
                self._probes(direction, seeded, kept)

    def _probes(self, direction: str, seeded: Any, first: Expected) -> None:
        """Compare the few rows that were kept of other timed calls.

        Raises:
            Stopped: they are inaccurate.
        """
        name = "out" if direction == "forward" else "dq"
        probes = self.judge.passes[direction].probes
        if not probes:
            return
        case, scales = self.attempt.request.case, self.calls.scales
        allowed, usual = allowed_error(first.tolerances[name].relative), usual_size(first.tensors[name])
        looked = [
            (
                probe_errors(case, seeded, probes, name, scales.get(name, 1.0), usual),
                allowed,
                f"{len(probes[0].rows)} rows of {name}, drawn at random, are off by {{:.2g}} of their",
            )
        ]
        if direction == "backward":
            of_sums = sum_errors(case, seeded, probes, scales.get("dv", 1.0))
            looked.append(
                (
                    of_sums,
                    allowed_error(first.tolerances["dv"].relative),
                    "the sum of dv over the keys is off by {:.2g} of its",
                )
            )
        for errors, most, what in looked:
            for probe, error in zip(probes, errors, strict=True):
                if error > most:
                    raise Stopped(
                        "inaccurate",
                        f"{direction}: the first call is right, call {probe.index} not: {what.format(error)} norm, "
                        f"allowed is {most:.2g}",
                    )

    def _timed_pass(self, direction: str, inputs: Any, expected: Expected, seeded: Any, first: Expected) -> None:
        count = self.judge.passes[direction].count
        for call, kept in self.judge.kept(direction):
            made = self._verdict(inputs, expected, kept.results)
            described = f"{self._described()}, signs changed"
            self._add(call, kept.results, expected, made, described, forms=kept.forms, index=kept.index, of=count)
            if made.wrong is None:
                continue
            stale = self._verdict(seeded, first, kept.results).wrong is None
            why = "it is the result of the first call's inputs, which have changed since" if stale else made.wrong
            which = "drawn at random" if call == "drawn" else "after the timing"
            raise Stopped("inaccurate", f"{direction}: the first call is right, call {kept.index} ({which}) not: {why}")

    def _verdict(self, inputs: Any, expected: Expected, results: Results) -> Verdict:
        return verdict(self.attempt.request.case, inputs, expected, results, self.calls.scales)

    def _described(self) -> str:
        return distribution(self.attempt.request.case, self.attempt.request.measuring.inputs)

    def _seeded(self) -> Any:
        request = self.attempt.request
        return self.workload.make_inputs(
            request.case,
            request.device,
            request.measuring.seed,
            with_gradients=self.attempt.with_gradients,
            kind=request.measuring.inputs,
        )

    def _add(
        self,
        call: Literal["first", "hard", "drawn", "last"],
        results: Results,
        expected: Expected,
        made: Verdict,
        inputs: str,
        forms: dict[str, Form] | None = None,
        **which: int,
    ) -> None:
        self.attempt.judged.append(
            Judged(
                call=call,
                passes=tuple(dict.fromkeys(_pass_of(name) for name in results)),
                inputs=inputs,
                largest_score=expected.largest_score,
                rows=made.rows,
                rows_of=made.rows_of,
                heads=made.heads,
                form=forms or {name: form_of(tensor) for name, tensor in results.items()},
                **which,
            )
        )


def _pass_of(name: str) -> str:
    return "forward" if name == "out" else "backward"
