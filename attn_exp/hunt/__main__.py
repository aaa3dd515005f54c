"""Search for a bug with Hypothesis: `python -m attn_exp.hunt PARENT`, for `attn-exp hunt`.

Reads a `Question` as JSON from standard input, and writes the state of the search (`Search`) as lines of JSON.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # The current folder comes last: a file secrets.py or numpy.py in it hides no module.
    sys.path.append(sys.path.pop(0))

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from attn_exp.backends.base import load_backend
from attn_exp.backends.package import Unavailable
from attn_exp.backends.supports import Supports
from attn_exp.core.case.case import DTYPE_BYTES
from attn_exp.core.case.masks import EVERY
from attn_exp.core.errors import UserError
from attn_exp.core.host.process import die_with_parent
from attn_exp.hunt.example import Example, Outcome, Question, Search
from attn_exp.hunt.judge import Judge
from attn_exp.hunt.space import Examples, Space
from attn_exp.hunt.tester import Hello, Tester

# The statuses that are bugs; an example with another status is discarded. Hypothesis takes failures of one type at one
# line for one bug, and shrinks each bug for itself.
_BUGS: dict[str, type[AssertionError]] = {
    name: type(name, (AssertionError,), {}) for name in ("inaccurate", "error", "crashed", "timeout")
}
# More than a search can try.
_ENDLESS = 10**9
_SHOWN_EVERY_S = 0.5
_EVERYTHING = Supports(
    devices=("cuda", "cpu"), dtypes=tuple(DTYPE_BYTES), masks=EVERY, features=("softcap", "packed"),
    keyless=True, value_dims="any",
)  # fmt: skip


class _Over(Exception):
    """The time for drawing examples is spent."""


class Searching:
    """A search on one backend: what was tried, and the simplest failure; `show` takes the state as it goes on."""

    def __init__(self, tester: Tester, show: Callable[[Search], None]) -> None:
        self._tester = tester
        self._show = show
        self._known: dict[Example, Outcome | None] = {}
        self._began = time.monotonic()
        self._shown = 0.0
        self.state = Search()

    def run(self, examples: st.SearchStrategy[Example], until: float, shrink_until: float, *, seed: int) -> None:
        """Draw examples until `until` or a bug, then shrink it until `shrink_until` (of `time.monotonic`)."""

        # Built here rather than as a decorator: the strategy is not known at import.
        def test(example: Example) -> None:
            deadline = until if self.state.example is None else shrink_until
            if example not in self._known:
                if time.monotonic() >= deadline:
                    if self.state.example is None:
                        raise _Over
                    # Nothing fails any more, so that the shrinking ends.
                    return
                self._try(example, deadline)
            outcome = self._known[example]
            if outcome is None or outcome.status not in (*_BUGS, "ok"):
                reject()
            if outcome.status in _BUGS:
                self._keep(example, outcome)
                raise _BUGS[outcome.status](outcome.reason)

        options = settings(
            max_examples=_ENDLESS, deadline=None, database=None, derandomize=False, report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip
        try:
            options(hypothesis.seed(seed)(given(examples)(test)))()
        except (_Over, AssertionError, Unsatisfiable):
            # Unsatisfiable: of what where= leaves there is nothing of this kind, or nothing that the backend computes.
            return

    def _try(self, example: Example, until: float) -> None:
        now = time.monotonic()
        self.state = replace(self.state, now=example.label(), spent_s=now - self._began)
        if now - self._shown > _SHOWN_EVERY_S:
            self._show(self.state)
            self._shown = now
        self._known[example] = outcome = self._tester.outcome(example, until)
        state = replace(self.state, spent_s=time.monotonic() - self._began)
        if outcome is None:
            self.state = state
        elif outcome.status == "unsupported":
            self.state = replace(state, refused=state.refused + 1, why=outcome.reason or "")
        elif outcome.status == "out_of_memory":
            self.state = replace(state, too_large=state.too_large + 1)
        else:
            self.state = replace(state, tried=state.tried + 1, large=state.large + (example.large is not None))

    def _keep(self, example: Example, outcome: Outcome) -> None:
        """Keep an example that shows the bug: Hypothesis tries smaller ones, and the smallest again at its end."""
        state = self.state
        if state.outcome is None:
            state = replace(state, after_s=state.spent_s)
        elif state.outcome.status != outcome.status:
            # Another bug: the first one is shrunk.
            return
        self.state = replace(state, example=example, outcome=outcome)


def search(question: Question, show: Callable[[Search], None]) -> Search:
    """Search until a bug is found and shrunk, or the budget is spent; return the last state.

    Raises UserError if nothing can be searched.
    """
    space = Space(question.where)
    tester = Tester(functools.partial(_made, question), question.device)
    hello = tester.hello()
    if hello.missing is not None:
        raise UserError(hello.missing)
    examples = Examples(hello.supports or _EVERYTHING, space, question.device)
    searching = Searching(tester, show)
    began = time.monotonic()
    end = began + question.budget_s
    # Most bugs are of small shapes; large offsets have a part of the time.
    small, large = (value in space.among("large", (False, True)) for value in (False, True))
    stages = [
        *([(examples.small(), 5.0)] if small else []),
        *([(examples.spread(), 2.0)] if large else []),
        *([(examples.small(), 1.0)] if small else []),
    ]
    # The end of the budget is for making a late find smaller.
    unit = 0.9 * question.budget_s / sum(part for _, part in stages)
    for index, (strategy, _) in enumerate(stages):
        until = began + unit * sum(part for _, part in stages[: index + 1])
        if searching.state.example is None and time.monotonic() < until:
            searching.run(strategy, until, end, seed=question.seed + index)
    tester.close()
    state = searching.state
    if not state.tried:
        why = state.why or "nothing of what where= leaves can be computed"
        raise UserError(f"no example could be tried: {why}")
    return replace(state, over=True, spent_s=time.monotonic() - began)


def _made(question: Question) -> tuple[Hello, Callable[[Example], Outcome]]:
    """Load the backend, in the process that runs examples."""
    try:
        backend = load_backend(question.backend)
    except Unavailable as error:
        return Hello(missing=str(error)), lambda example: Outcome(status="unavailable")
    supports = getattr(backend, "supports", None)
    judge = Judge(backend, question.device)
    return Hello(supports=supports if isinstance(supports, Supports) else None), judge.outcome


def main() -> None:
    """Answer the question on standard input."""
    die_with_parent(int(sys.argv[1]))
    # Whatever else is printed goes where mistakes go.
    replies = os.dup(1)
    os.dup2(2, 1)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)

    def show(state: Search) -> None:
        os.write(replies, msgspec.json.encode(state) + b"\n")

    try:
        show(search(question, show))
    except UserError as error:
        show(Search(over=True, mistake=str(error)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
