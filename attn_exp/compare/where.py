"""Where: a small language for choosing cells, `causal and seq_len >= 4096`. Parsed here, never evaluated as Python.

    expression := and_part ("or" and_part)*
    and_part   := not_part ("and" not_part)*
    not_part   := "not" not_part | "(" expression ")" | comparison
    comparison := operand [("==" | "=" | "!=" | "<" | "<=" | ">" | ">=") operand
                          | ["not"] "in" "(" operand ("," operand)* ")"]
    operand    := NUMBER | 'TEXT' | "TEXT" | true | false | none | NAME | WORD

A word that names no field is text, so `backend == flash` needs no quotes. What is missing (a metric of a job that
failed) is neither smaller nor larger than anything.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.core.case import DTYPES
from attn_exp.core.errors import UserError, nearest
from attn_exp.results.cell import Cell
from attn_exp.results.fields import Getter, distinct, fields, getter

Test = Callable[[Cell], bool]
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<text>'[^']*'|"[^"]*")|(?P<word>[A-Za-z_][\w./+-]*)|(?P<sign>==|!=|<=|>=|[=<>(),]))""",
    re.VERBOSE,
)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_KEYWORDS = ("and", "or", "not", "in")
_EXAMPLE = 'for example where="causal and seq_len >= 4096"'
_DEEPEST = 50


@dataclass(frozen=True)
class _Operand:
    """A field or a constant; `name` is the field's, None for a constant."""

    get: Getter
    name: str | None
    constant: Any = None


def chosen(cells: Sequence[Cell], expression: str) -> list[Cell]:
    """The cells for which the expression holds.

    Raises:
        UserError: it is no expression, names what is not there, or holds for nothing.
    """
    test = _Parser(expression, cells).whole()
    found = [cell for cell in cells if test(cell)]
    if not found:
        raise UserError(f'where="{expression}" leaves none of {len(cells)} cells: choose more')
    return found


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, expression: str, cells: Sequence[Cell]) -> None:
        self._expression, self._cells = expression, cells
        self._known = fields(cells)
        self._tokens = self._split(expression)
        self._at = self._depth = 0

    def whole(self) -> Test:
        """The test that the expression stands for."""
        test = self._any()
        if self._at < len(self._tokens):
            raise self._error(f"'{self._tokens[self._at][1]}' is not expected there")
        return test

    def _split(self, expression: str) -> list[tuple[str, str]]:
        tokens, position = [], 0
        while expression[position:].strip():
            match = _TOKEN.match(expression, position)
            if match is None:
                raise self._error(f"'{expression[position:].strip()[:12]}' is not understood")
            assert match.lastgroup is not None
            tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        return tokens

    def _any(self) -> Test:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error("it is nested too deeply")
        tests = [self._all()]
        while self._take("or"):
            tests.append(self._all())
        self._depth -= 1
        return tests[0] if len(tests) == 1 else lambda cell: any(test(cell) for test in tests)

    def _all(self) -> Test:
        tests = [self._not()]
        while self._take("and"):
            tests.append(self._not())
        return tests[0] if len(tests) == 1 else lambda cell: all(test(cell) for test in tests)

    def _not(self) -> Test:
        negated = False
        while self._take("not"):
            negated = not negated
        test = self._group() if self._take("(") else self._comparison()
        return (lambda cell: not test(cell)) if negated else test

    def _group(self) -> Test:
        test = self._any()
        self._need(")")
        return test

    def _comparison(self) -> Test:
        left = self._operand()
        sign = self._tokens[self._at][1] if self._at < len(self._tokens) else ""
        if sign in _COMPARISONS:
            self._at += 1
            return self._compare(left, sign, self._operand())
        negated = self._take("not")
        if self._take("in"):
            self._need("(")
            choices = [self._compare(left, "==", self._operand())]
            while self._take(","):
                choices.append(self._compare(left, "==", self._operand()))
            self._need(")")
            return lambda cell: any(test(cell) for test in choices) != negated
        if negated:
            raise self._error("'not' is not expected there")
        if left.name is None:
            # A word alone is meant for a field: text or a number says nothing by itself.
            self._field(left.constant)
        return lambda cell: bool(left.get(cell))

    def _compare(self, left: _Operand, sign: str, right: _Operand) -> Test:
        if left.name is None and right.name is None:
            self._field(left.constant if isinstance(left.constant, str) else right.constant)
        if left.name is not None and right.name is None:
            right = self._checked(left, right, sign)
        if right.name is not None and left.name is None:
            left = self._checked(right, left, sign)
        compare, ordered = _COMPARISONS[sign], sign not in ("==", "=", "!=")

        def test(cell: Cell) -> bool:
            one, other = left.get(cell), right.get(cell)
            if ordered and (one is None or other is None or _kind(one) != _kind(other)):
                return False
            return compare(one, other)

        return test

    def _checked(self, field: _Operand, constant: _Operand, sign: str) -> _Operand:
        """The constant, once it is one that the field can be compared with."""
        value = DTYPES.get(constant.constant, constant.constant) if field.name == "dtype" else constant.constant
        there = [other for other in distinct(map(field.get, self._cells)) if other is not None]
        if sign not in ("==", "=", "!=") and any(_kind(value) != _kind(other) for other in there[:1]):
            example = f"{field.name} is {there[0]!r} somewhere"
            raise self._error(f"{field.name} {sign} {value!r} compares unlike things ({example})")
        if isinstance(value, str) and value not in there:
            choices = sorted(str(other) for other in there)
            raise self._error(
                f"no {field.name} is '{value}': {nearest(value, choices)}there are {', '.join(choices[:12])}"
            )
        return _Operand(lambda _: value, None, value)

    def _operand(self) -> _Operand:
        if self._at >= len(self._tokens):
            raise self._error("it ends too early")
        kind, token = self._tokens[self._at]
        self._at += 1
        if kind == "sign" or token in _KEYWORDS:
            raise self._error(f"'{token}' is not expected there")
        if kind == "word" and token in self._known:
            return _Operand(self._known[token], token)
        value: Any = token
        if kind == "number":
            value = float(token.replace("_", ""))
        elif kind == "text":
            value = token[1:-1]
        elif token.lower() in _CONSTANTS:
            value = _CONSTANTS[token.lower()]
        return _Operand(lambda _: value, None, value)

    def _field(self, name: Any) -> Getter:
        if not isinstance(name, str):
            raise self._error("it compares two constants")
        return getter(name, self._known, f'where="{self._expression}"')

    def _take(self, token: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at][1] == token
        self._at += found
        return found

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise self._error(f"a '{token}' is missing")

    def _error(self, what: str) -> UserError:
        return UserError(f'where="{self._expression}" is no filter: {what}; {_EXAMPLE}')


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    return "number" if isinstance(value, (int, float)) else "text"
