"""Find out whether results have the same bits: over calls, positions in the batch, batch sizes and phases."""

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls, load_backend, step
from attn_exp.core.record.checked import BUDGET_S, CALLS, Bitwise
from attn_exp.timers.call import synchronize
from attn_exp.worker.attempt import Attempt, Stopped, status_of
from attn_exp.worker.check.form import ResultForm, Results
from attn_exp.worker.differences import Compared, difference, first_differences, index_of
from attn_exp.worker.machine.device import Machine
from attn_exp.worker.other_batches import OtherBatch, other_phases, other_positions, other_sizes
from attn_exp.worker.prepare import PreparedBackend, calls_for
from attn_exp.worker.unrest import Unrest

# Names a result by the name of a tensor and the index of an element.
Name = Callable[[str, Sequence[int]], str]
# A GPU is waited for after so many calls, so that the budget is that of the calls and not of their launches.
_WAITS_AFTER = 10
_DIFFER_ALREADY = "calls on the same inputs differ already"
# Statuses that another batch may end in without being a mistake.
_NOT_POSSIBLE = ("out_of_memory", "unsupported", "unavailable")


class _Impossible(Exception):
    """There is nothing to compare with; the message says why."""


def measure_determinism(attempt: Attempt, machine: Machine, prepared: PreparedBackend) -> None:
    """Compare the bits of results of each requested pass, and keep what was found.

    Raises Stopped if a call failed, or one has values that are not finite where others are, or calls differ although
    the backend's option `deterministic` is set.
    """
    with attempt.stage("determinism"):
        # Its graph would lie beside another one.
        prepared.calls.pop("backward", None)
        comparing = _Comparing(attempt, machine, prepared)
        try:
            facts = comparing.run()
        finally:
            prepared.check.contents.write(prepared.check.seeded())
    for direction, of_pass in facts.items():
        attempt.passes[direction] = replace(attempt.passes[direction], bitwise=of_pass)
    if attempt.request.backend.get("deterministic") is not True:
        return
    for direction, of_pass in facts.items():
        if of_pass["calls"].same is False:
            raise Stopped("nondeterministic", f"{direction}: deterministic=true, and {of_pass['calls'].first}")


@dataclass
class _Tally:
    """Comparisons of results of one pass with its usual results; `cut` if the time was over before all were compared.

    `compared` has the number of the result, its tensor's name, the comparison, and what names the result.
    """

    compared: list[tuple[int, str, Compared, Name]] = field(default_factory=list)
    results: int = 0
    why: list[str] = field(default_factory=list)
    cut: bool = False

    def add(self, results: Results, usual: Results, name: Name) -> None:
        """Compare the tensors of one more result."""
        for tensor, result in results.items():
            self.compared.append((self.results, tensor, Compared.of(result, usual[tensor]), name))
        self.results += 1

    def fact(self, direction: str, least: int = 1) -> Bitwise:
        """Return what the comparisons say, `yes` only of so many results at least; waits for the device.

        Raises Stopped if a result has values that are not finite where others are.
        """
        numbers = first_differences([pair for _, _, pair, _ in self.compared])
        for (_, tensor, pair, name), each in zip(self.compared, numbers, strict=True):
            here, usually = each[-2:]
            if here or usually:
                call = name(tensor, index_of(each[1], pair.shape)) if here else "the call that others are compared with"
                raise Stopped("inaccurate", f"{direction}: {call} has values in {tensor} that are not finite")
        differing = [(*entry, row) for entry, row in zip(self.compared, numbers, strict=True) if row[0]]
        why = "; ".join(dict.fromkeys(self.why)) or None
        if not differing:
            same = True if self.results >= least and not self.cut else None
            return Bitwise(same=same, compared=self.results, why=why)
        _, tensor, pair, name, row = differing[0]
        place = index_of(row[1], pair.shape)
        return Bitwise(
            same=False,
            compared=self.results,
            differing=len({number for number, *_ in differing}),
            first=difference(pair, row, tensor, name(tensor, place)),
            why=why,
        )


class _Comparing:
    """The comparisons of one job. It keeps its current step for the reason of a failure."""

    def __init__(self, attempt: Attempt, machine: Machine, prepared: PreparedBackend) -> None:
        self._attempt, self._request, self._device = attempt, attempt.request, machine.device
        self._prepared, self._check, self._calls = prepared, prepared.check, prepared.check.calls
        self._passes = attempt.request.measuring.passes
        self._until = time.monotonic() + BUDGET_S
        self._dice = random.Random()
        self._usual: dict[str, Results] = {}
        self._doing = ""

    def run(self) -> dict[str, dict[str, Bitwise]]:
        """Return what was found by pass and way."""
        self._check.contents.change("step")
        facts: dict[str, dict[str, Bitwise]] = {name: {} for name in self._passes}
        with self._prepared.scope():
            for direction in self._passes:
                facts[direction]["calls"] = self._over_calls(direction)
        if self._request.case.workload is None and not self._attempt.given and self._usual.keys() == set(self._passes):
            self._over_batches(facts)
        return facts

    def _over_calls(self, direction: str) -> Bitwise:
        tally = _Tally()

        def compare() -> None:
            self._doing = f"{direction}, call 1 of {CALLS} on the same inputs"
            call = _pass_of(self._calls, direction)
            first = self._check.form.results(direction, call())
            self._usual[direction] = usual = {name: tensor.clone() for name, tensor in first.items()}
            del first
            unrest = Unrest(usual, self._check.contents.tensors["d_out"].device)
            try:
                for number in range(2, CALLS + 1):
                    if number % _WAITS_AFTER == 0:
                        synchronize(self._device)
                    if self._late(tally):
                        return
                    self._doing = f"{direction}, call {number} of {CALLS} on the same inputs"
                    unrest.before(number)
                    results = self._check.form.results(direction, call())
                    tally.add(results, usual, partial(_named, f"call {number}"))
            finally:
                unrest.end()

        self._try(compare, tally)
        return tally.fact(direction, CALLS - 1)

    def _over_batches(self, facts: dict[str, dict[str, Bitwise]]) -> None:
        """Compare with other positions and batch sizes; passes whose calls differ are not compared."""
        case, usual = self._request.case, self._present()
        ways: dict[str, list[Callable[[dict[str, _Tally]], None]]] = {
            "positions": [
                partial(self._elsewhere if batch.case == case else self._apart, batch, usual)
                for batch in other_positions(case, self._dice)
            ],
            "batch_sizes": [partial(self._apart, batch, usual) for batch in other_sizes(case, self._dice)],
            "phases": [partial(self._apart, batch, usual) for batch in other_phases(case)],
        }
        for way, comparisons in ways.items():
            if not comparisons:
                continue
            # Gradients of keys are sums over all queries.
            passes = [name for name in self._passes if way != "phases" or name == "forward"]
            tallies = {name: _Tally() for name in passes if facts[name]["calls"].first is None}
            for compare in comparisons:
                if not tallies or self._late(*tallies.values()):
                    break
                self._try(partial(compare, tallies), *tallies.values())
            for direction in passes:
                differs = Bitwise(same=False, why=_DIFFER_ALREADY)
                facts[direction][way] = tallies[direction].fact(direction) if direction in tallies else differs

    def _present(self) -> Inputs:
        """Return copies of what the calls read now."""
        contents = self._check.contents
        q, k, v, d_out = (contents.numbers(name).detach().clone() for name in ("q", "k", "v", "d_out"))
        for tensor in (q, k, v):
            tensor.requires_grad_(self._attempt.with_gradients)
        seeded: Inputs = self._check.seeded()
        return replace(seeded, q_bhsd=q, k_bhsd=k, v_bhsd=v, d_out_bhsd=d_out)

    def _elsewhere(self, batch: OtherBatch, usual: Inputs, tallies: dict[str, _Tally]) -> None:
        """Compare the calls themselves on the rows at other positions."""
        self._doing = batch.names[0]
        self._check.contents.write(batch.inputs(usual))
        synchronize(self._device)
        with self._prepared.scope():
            self._compare(self._calls, self._check.form, batch, tallies)

    def _apart(self, batch: OtherBatch, usual: Inputs, tallies: dict[str, _Tally]) -> None:
        """Compare what the backend prepares for another batch."""
        self._doing = f"{batch.case.label()}, of which {batch.names[0]}"
        request, inputs = replace(self._request, case=batch.case), batch.inputs(usual)
        backend = load_backend(request.backend)
        if reason := backend.unsupported(request.case, self._device):
            raise _Impossible(reason)
        calls = calls_for(request, self._check.workload, backend, inputs)
        with calls.scope():
            self._compare(calls, ResultForm(inputs, calls.scales), batch, tallies)

    def _compare(self, calls: Calls, form: ResultForm, batch: OtherBatch, tallies: dict[str, _Tally]) -> None:
        for direction, tally in tallies.items():
            results = form.results(direction, _pass_of(calls, direction)())
            if calls.scales:
                raise _Impossible("the scales of results in codes are those of a whole batch")
            # That of sinks is the sum over the batch.
            results = {name: tensor for name, tensor in results.items() if name != "d_sink"}
            usual = {name: batch.picked(name, self._usual[direction][name]) for name in results}
            tally.add(results, usual, batch.name)
        synchronize(self._device)

    def _late(self, *tallies: _Tally) -> bool:
        if time.monotonic() < self._until:
            return False
        for tally in tallies:
            tally.cut = True
            tally.why.append(f"{BUDGET_S:g} s were over")
        return True

    def _try(self, compare: Callable[[], None], *tallies: _Tally) -> None:
        """Compare, or note why it is not possible. A call that fails ends the job."""
        try:
            compare()
        except Exception as error:  # a backend may raise anything
            if isinstance(error, Stopped):
                status, reason = error.status, error.reason
            else:
                status, reason = status_of(error, str(self._request.backend["name"]))
            if isinstance(error, _Impossible):
                reason = str(error)
            elif status not in _NOT_POSSIBLE:
                if status == "error":
                    traceback.print_exc()
                raise Stopped(status, f"{self._doing}: {reason}") from error
            for tally in tallies:
                tally.why.append(f"{self._doing}: {reason}")


def _pass_of(calls: Calls, direction: str) -> Callable[[], Any]:
    """Return a call of a pass; a backward's forward is made now."""
    if direction == "forward":
        return calls.forward
    return partial(step, calls) if direction == "step" else calls.backward(calls.forward())


def _named(name: str, tensor: str, index: Sequence[int]) -> str:
    return name
