"""The judge of one job: what was timed is what is compared with the reference.

Between timed calls the inputs change. One timed call of each pass is *drawn*, by reservoir sampling, so that nobody can
foresee it, and its results are copied at once, on the stream of the call. After the timing the timer makes one call
more, the *last*, on a relative of the drawn call's inputs, so that one reference judges them all.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from attn_exp.attention.fresh_inputs import FreshInputs, State, every_channel, flip_signs
from attn_exp.attention.inputs import DifferentiableInputs
from attn_exp.attention.verdict import malformed
from attn_exp.backends.base import Calls
from attn_exp.core.case import Case
from attn_exp.timers.graph import GraphTimer
from attn_exp.timers.loop import Timer
from attn_exp.timers.sync import synchronize
from attn_exp.timers.timed_call import TimedCall
from attn_exp.worker.judge.cpu_time import CpuTimes
from attn_exp.worker.judge.judged import form_of
from attn_exp.worker.judge.linked import Linked
from attn_exp.worker.judge.looks import Looks
from attn_exp.worker.judge.products import products
from attn_exp.worker.judge.timed_pass import Kept, Results, TimedPass, form_only, poison
from attn_exp.worker.stopped import Stopped


class Judge:
    """Renews the inputs of one job's calls, and keeps the results to be compared with a reference.

    Args:
        case: the problem.
        calls: of the backend, or of the block around it.
        inputs: those of the seed, which the backend was given.
    """

    def __init__(self, case: Case, calls: Calls, inputs: DifferentiableInputs) -> None:
        self._calls, self._like = calls, inputs.d_out
        self.read = calls.inputs or inputs
        self.fresh = FreshInputs(self.read)
        gradients = tuple(inputs.gradient_names)
        self._names = {"forward": ("out",), "backward": gradients, "step": ("out", *gradients)}
        leaves = dict(zip(inputs.gradient_names, inputs.leaves, strict=True))
        self._shapes = {name: tuple(leaf.shape) for name, leaf in ({"out": inputs.d_out} | leaves).items()}
        # Seeded by the system, so that no seed that a backend sets foretells what is drawn.
        self._dice = random.Random(random.SystemRandom().getrandbits(128))
        self._has_graph: bool | None = None
        self.passes: dict[str, TimedPass] = {}
        self.looks = Looks(case, self.read, calls.scales)
        self._linked = Linked(self.read, self.fresh)
        # The output that the timed backward is of, and the inputs of its forward; a later pass changes them.
        self._out: torch.Tensor | None = None
        self.beside = self.fresh.state
        # Backwards after the timing.
        self.later = TimedPass(self._names["backward"], {})

    def results(self, direction: str, returned: Any) -> Results:
        """Return what a call returned by name.

        Raises:
            Stopped: it is not what a call of that pass returns.
        """
        names = self._names[direction]
        tensors = (returned,) if direction == "forward" else returned
        if direction != "forward" and (not isinstance(tensors, Sequence) or len(tensors) != len(names)):
            count = len(tensors) if isinstance(tensors, Sequence) else type(tensors).__name__
            kind = "gradients" if direction == "backward" else "tensors"
            raise Stopped(
                "inaccurate", f"the {direction} returned {count}, not the {len(names)} {kind} {', '.join(names)}"
            )
        results: Results = {}
        for name, tensor in zip(names, tensors, strict=True):
            # Not a method of the tensor itself: an object can have its own `detach`.
            plain = torch.Tensor.detach(tensor) if type(tensor) is torch.Tensor else tensor
            wrong = malformed(name, plain, shape=self._shapes[name], like=self._like, scales=self._calls.scales)
            if wrong:
                raise Stopped("inaccurate", f"{direction}: {wrong}")
            results[name] = plain
        if "out" in names:
            self._check_graph(tensors[0])
        return results

    def _check_graph(self, out: torch.Tensor) -> None:
        """Raise Stopped unless an output has a graph as the first one had: without one there is less to do."""
        if self._has_graph is None:
            self._has_graph = out.requires_grad
        elif out.requires_grad != self._has_graph:
            which = "without" if self._has_graph else "with"
            raise Stopped("inaccurate", f"forward: the output of a later call is {which} a graph, unlike the first one")

    def timed(self, direction: str, run: Callable[[], Any]) -> TimedCall:
        """Return a call as a timer makes it, with new inputs before each call and a look at each result."""
        on_cpu = self.fresh.tensors["d_out"].device.type == "cpu"
        known = self.passes[direction] = TimedPass(self._names[direction], {}, cpu=CpuTimes() if on_cpu else None)
        first = True

        def before() -> None:
            # The graph of a call before, if the timer repeats the last one.
            known.result = None
            self._renew(direction, known)
            # Reservoir sampling: each of n calls is the drawn one with probability 1 / n.
            known.draws = self._dice.random() * (known.count + 1) < 1
            # Not before a call that may be drawn: memory that holds NaN would tell a backend that it is.
            if known.wants_last:
                poison(known.like.values(), self.fresh.tensors["d_out"].device)
            if known.cpu is not None and not known.wants_last:
                known.cpu.begin()

        def after(returned: Any) -> None:
            nonlocal first
            if known.cpu is not None and not known.wants_last:
                known.cpu.end()
            known.count += 1
            if not (known.draws or known.wants_last or first):
                # All calls have the first one's form: a cheap look at each.
                self._look(direction, known, returned)
                self._probe(known, (returned,) if direction == "forward" else returned)
                return
            results = self.results(direction, returned)
            self._probe(known, tuple(results.values()))
            if first:
                known.like, first = {name: form_only(tensor) for name, tensor in results.items()}, False
            forms = {name: form_of(tensor) for name, tensor in results.items()}
            # Copied on the call's own stream, without waiting: work that this stream does not wait for is missing.
            copies = {name: tensor.clone() for name, tensor in results.items()}
            kept = Kept(copies, self.fresh.state, known.count, forms)
            if known.wants_last:
                known.last, known.result = kept, returned if direction == "forward" else None
            else:
                known.drawn = kept

        return TimedCall(run, before, after)

    def start(self, direction: str) -> None:
        """Forget the calls so far: those whose samples are kept come now, and one of these is drawn."""
        known = self.passes[direction]
        known.count, known.drawn = 0, None
        known.probes.clear()
        known.sums.clear()
        # What a call before the timing did wrong stays.
        known.links = [replace(link, index=0) for link in known.links]
        if known.cpu is not None:
            known.cpu.clear()

    def _renew(self, direction: str, known: TimedPass) -> None:
        if not (known.wants_last and known.drawn):
            self._linked.renew(direction, known)
            return
        self._linked.forget(known)
        state = known.drawn.state
        if direction == "forward":
            self.fresh.set_forward(self.fresh.relative(state))
        elif direction == "step":
            self.fresh.set_forward(state)
            self.fresh.set_gradient(state, negated=not state.negated)
        else:
            self.fresh.set_gradient(state, negated=True)

    def _probe(self, known: TimedPass, returned: Sequence[torch.Tensor]) -> None:
        """Look at a call if it is among those chosen at random."""
        self.looks.perhaps(known, returned, self.fresh.state, self._out)
        self._linked.look(known, dict(zip(known.names, returned, strict=True)))

    def _look(self, direction: str, known: TimedPass, returned: Any) -> None:
        tensors = (returned,) if direction == "forward" else returned
        if not isinstance(tensors, Sequence) or len(tensors) != len(known.names):
            self.results(direction, returned)
        for tensor, like in zip(tensors, known.like.values(), strict=True):
            if type(tensor) is not torch.Tensor or tensor.shape != like.shape or tensor.dtype != like.dtype:
                self.results(direction, returned)
        if "out" in known.names:
            self._check_graph(tensors[0])

    def make_last(self, direction: str, timer: Timer, call: TimedCall) -> None:
        """Let the timer make one call more, and keep its results."""
        known = self.passes[direction]
        known.wants_last = True
        try:
            timer.block(call, 1)
        finally:
            known.wants_last = False
        if isinstance(timer, GraphTimer):
            # The graph's own output, without the saved tensors that a backward needs.
            known.result = None

    def backward(self) -> Callable[[], Any]:
        """Return the backward of the last timed forward, or of a new one if none was timed.

        Raises:
            Stopped: it computes while it is made, which no timer sees; on a CPU.
        """
        forward = self.passes.get("forward")
        out = None if forward is None else forward.result
        if forward is not None:
            forward.result = None
        out = self._calls.forward() if out is None else out
        self._out, self.beside = torch.Tensor.detach(out).clone(), self.fresh.state
        if out.device.type != "cpu" or self._calls.scales:
            return self._calls.backward(out)
        made: list[Callable[[], Any]] = []
        early = products(lambda: made.append(self._calls.backward(out)))
        if early:
            names = ", ".join(sorted(early)[:3])
            raise Stopped("implausible", f"backward: {names} ran while the backward was made, before it is timed")
        return made[0]

    def write(self, values: DifferentiableInputs) -> None:
        """Write other values into what the calls read, and wait until they are there."""
        self.fresh.write(values)
        synchronize(self._like.device.type)

    def forward(self) -> torch.Tensor:
        """Return the output of a forward on the inputs as they are."""
        out: torch.Tensor = self._calls.forward()
        return out

    def backward_of(self, out: torch.Tensor) -> Callable[[], Any]:
        """Return what makes and calls the backward of an output: work could be done while it is made, too.

        That of codes is made at once: their scales are those of an earlier backward, as with delayed scaling.
        """
        make = self._calls.backward
        return make(out) if self._calls.scales else lambda: make(out)()

    def look(self, gradients: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> int:
        """Look at a backward after the timing, of `out` or else of the output that was timed; return its number."""
        self.later.count += 1
        returned = tuple(self.results("backward", gradients).values())
        self.looks.at(self.later, returned, self.fresh.state, self._out if out is None else out)
        return self.later.count

    def state(self, direction: str) -> State:
        """Return how the inputs differed for the results that are judged: a reference is needed of these.

        That of a step is its own; forward and backward have one.
        """
        step = self.passes.get("step")
        if direction == "step" and step is not None and step.drawn is not None:
            return step.drawn.state
        backward, forward = self.passes.get("backward"), self.passes.get("forward")
        if backward is not None and backward.drawn is not None:
            return backward.drawn.state
        assert forward is not None and forward.last is not None
        return forward.last.state

    def kept(self, direction: str) -> Iterator[tuple[Literal["drawn", "last"], Kept]]:
        """Yield `drawn` and `last` of a pass, their results turned into those of `state`."""
        known, state = self.passes[direction], self.state(direction)
        several: tuple[tuple[Literal["drawn", "last"], Kept | None], ...] = (
            ("drawn", known.drawn),
            ("last", known.last),
        )
        for call, kept in several:
            if kept is None:
                continue
            for name, tensor in kept.results.items():
                if name != "out" and kept.state.negated != state.negated:
                    flip_signs(tensor, every_channel(tensor))
                elif name == "out" and "v" in state.signs:
                    flip_signs(tensor, kept.state.signs["v"] ^ state.signs["v"])
            yield call, replace(kept, state=state)
