"""Search with Hypothesis until the budget is spent, and keep the simplest example that fails."""

import time
from collections.abc import Callable
from dataclasses import replace

import hypothesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from attn_exp.core.hunting import Example, Find, Outcome, Search
from attn_exp.hunt.tester import Tester

# What is a bug; of other statuses the example is discarded.
_BUGS = ("inaccurate", "error", "crashed", "timeout")
# More than a search can try.
_ENDLESS = 10**9
_SHOWN_EVERY_S = 0.5


class Searching:
    """A search on one backend: what was tried, and the simplest failure.

    Args:
        tester: runs examples.
        show: takes the state whenever it may be of interest.
    """

    def __init__(self, tester: Tester, show: Callable[[Search], None]) -> None:
        self._tester = tester
        self._show = show
        self._known: dict[Example, Outcome | None] = {}
        self._began = time.monotonic()
        self._shown = 0.0
        self.state = Search()

    def run(self, examples: st.SearchStrategy[Example], until: float, shrink_until: float, *, seed: int) -> None:
        """Draw examples until `until` or a bug, then shrink it until `shrink_until` (of `time.monotonic`)."""

        class Over(Exception):
            pass

        def deadline() -> float:
            return shrink_until if self.state.find is not None else until

        # Built here rather than as a decorator: the strategy is not known at import.
        def test(example: Example) -> None:
            if time.monotonic() < deadline() or example in self._known:
                outcome = self._outcome(example, deadline())
            elif self.state.find is None:
                raise Over
            else:
                # Nothing fails any more, so that the shrinking ends.
                return
            if outcome is None or outcome.status not in (*_BUGS, "ok"):
                reject()
            if outcome.status in _BUGS:
                raise _FAILURES[outcome.status](outcome.reason)

        options = settings(
            max_examples=_ENDLESS, deadline=None, database=None, derandomize=False, report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip
        try:
            options(hypothesis.seed(seed)(given(examples)(test)))()
        except (Over, AssertionError, Unsatisfiable):
            # Unsatisfiable: of what where= leaves there is nothing of this kind, or nothing that the backend computes.
            return

    def _outcome(self, example: Example, until: float) -> Outcome | None:
        if example in self._known:
            return self._known[example]
        now = time.monotonic()
        self.state = replace(self.state, now=example.label(), spent_s=now - self._began)
        if now - self._shown > _SHOWN_EVERY_S:
            self._show(self.state)
            self._shown = now
        outcome = self._tester.outcome(example, until)
        self._known[example] = outcome
        self._count(example, outcome)
        return outcome

    def _count(self, example: Example, outcome: Outcome | None) -> None:
        state = replace(self.state, spent_s=time.monotonic() - self._began)
        if outcome is None:
            note = f"{example.label()} was still running when the time was over"
            state = replace(state, notes=(*state.notes, note))
        elif outcome.status == "unsupported":
            state = replace(state, refused=state.refused + 1, why=outcome.reason or "")
        elif outcome.status == "out_of_memory":
            state = replace(state, too_large=state.too_large + 1)
        elif outcome.status == "unavailable":
            raise Missing(outcome.reason)
        else:
            state = replace(state, tried=state.tried + 1, large=state.large + (example.large is not None))
        if outcome is not None and outcome.status in _BUGS:
            state = replace(state, find=self._simpler(state, example, outcome))
        self.state = state

    def _simpler(self, state: Search, example: Example, outcome: Outcome) -> Find:
        """Return the simplest find so far. Another kind of failure is another bug: the first one is shrunk."""
        find = state.find
        if find is None:
            return Find(example=example, outcome=outcome, after_s=state.spent_s)
        if outcome.status != find.outcome.status or example.weight >= find.example.weight:
            return find
        return replace(find, example=example, outcome=outcome)


class Missing(Exception):
    """The backend cannot be loaded."""


# Hypothesis takes failures of one type at one line for one bug, and shrinks each bug for itself.
_FAILURES: dict[str, type[AssertionError]] = {name: type(name, (AssertionError,), {}) for name in _BUGS}
