"""The pytest plugin: a fixture and a marker `attn_exp` that guard functions. It imports nothing heavy before a call.

```python
@pytest.mark.attn_exp(case="batch=2 seq_len=512", margin="5%")
def test_mine(attn_exp):
    attn_exp.assert_correct(mine)
    attn_exp.assert_not_slower(mine, than=scaled_dot_product_attention)
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from attn_exp.api import assert_correct, assert_not_slower

if TYPE_CHECKING:
    from attn_exp.api.guarded import Given, Guarded
    from attn_exp.api.timed import Timed

_MARKER = (
    "attn_exp(case=..., margin='3%', undecided='fail', ...): the arguments of attn_exp.assert_not_slower and "
    "assert_correct that the test does not give; -m attn_exp chooses such tests"
)
# Only one of the two takes these.
_OF_A_DUEL = ("margin", "undecided")
_INI = {"margin": "the margin of attn_exp.assert_not_slower: 3%", "undecided": "what undecided is: fail or warn"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `attn_exp_margin` and `attn_exp_undecided` of pytest's configuration."""
    for name, what in _INI.items():
        parser.addini(f"attn_exp_{name}", what)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


class Guard:
    """The asserts of `attn_exp` with arguments that the test's marker and pytest's configuration give."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)

    def assert_not_slower(
        self, function: Callable[..., Any], case: Given | None = None, *, than: Callable[..., Any], **more: Any
    ) -> Guarded:
        """Fail if a function is slower than another one; see `attn_exp.assert_not_slower`."""
        __tracebackhide__ = True
        given = self._arguments(case, more)
        return assert_not_slower(function, given.pop("case"), than=than, **given)

    def assert_correct(self, function: Callable[..., Any], case: Given | None = None, **more: Any) -> Timed:
        """Fail unless a function is right; see `attn_exp.assert_correct`."""
        __tracebackhide__ = True
        given = {name: one for name, one in self._arguments(case, more).items() if name not in _OF_A_DUEL}
        return assert_correct(function, given.pop("case"), **given)

    def _arguments(self, case: Given | None, more: Mapping[str, Any]) -> dict[str, Any]:
        given = {**self._given, **({} if case is None else {"case": case}), **more}
        if "case" not in given:
            from attn_exp.core.errors import UserError

            raise UserError("there is no case: give (q, k, v), or mark the test with attn_exp(case='seq_len=512')")
        return given


@pytest.fixture(name="attn_exp")
def _guard(request: pytest.FixtureRequest) -> Guard:
    """Return the asserts of `attn_exp`, with the arguments of the test's marker."""
    from attn_exp.core.errors import UserError

    given = {name: value for name in _INI if (value := request.config.getini(f"attn_exp_{name}"))}
    # The nearest marker last, so that a test's own overrides that of its module.
    for marker in reversed(list(request.node.iter_markers("attn_exp"))):
        if marker.args:
            raise UserError(f"the marker attn_exp takes names: write attn_exp(case={marker.args[0]!r})")
        given |= marker.kwargs
    return Guard(given)
