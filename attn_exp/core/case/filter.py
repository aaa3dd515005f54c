"""Filter expressions such as `causal and seq_len >= 4096`, which select things by their fields.

They are parsed with `ast` and never evaluated.

An expression consists of comparisons (`== = != < <= > >=`, `in (a, b)`, `not in (a, b)`), `and`, `or`, `not` and
parentheses. Operands are fields, numbers, quoted text, `true`, `false` and `none`. A word that is not a field is text,
so `backend == flash` needs no quotes. `<`, `<=`, `>` and `>=` are false for a missing value, such as a metric of a
failed job.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.core.case.case import DTYPES
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.text import printable, word

# Selected objects may have any type: a getter returns the value of a field, a test whether an expression holds.
Getter = Callable[[Any], Any]
Test = Callable[[Any], bool]
# `pass`, `forward/time_us` and `flash-8383` are not Python names, so the parser gets a placeholder for each operand.
_ATOM = re.compile(
    r"""(?P<number>-?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
    |(?P<text>'[^']*'|"[^"]*")|(?P<word>[^\W\d][\w./+-]*)|(?P<sign>==|!=|<=|>=|[=<>(),]|\s+)|(?P<unknown>.)""",
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS = ("and", "or", "not", "in")
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_EXAMPLE = 'for example where="causal and seq_len >= 4096"'
_LONGEST, _DEEPEST = 10_000, 50
# How many characters of an expression an error message repeats.
_SHOWN = 200


@dataclass(frozen=True)
class _Operand:
    """A field or a constant; `name` is the field's, None for a constant."""

    get: Getter
    name: str | None
    constant: Any = None


@dataclass(frozen=True)
class Conjunct:
    """One of the conditions that all have to hold: the fields that it reads, and the constants it compares with."""

    test: Test
    names: frozenset[str]
    constants: tuple[Any, ...]


class Filter:
    """A filter expression: Python parses it, and only a few node types of its syntax tree are accepted.

    Args:
        getters: the getter of each field.
        values: returns the values that a field has, without None; text that is none of them is a mistake.
        fields: the names of fields as the message about an unknown one lists them.
    """

    def __init__(
        self, expression: str, getters: Mapping[str, Getter], values: Callable[[str], Sequence[Any]], fields: str
    ) -> None:
        self._known = getters
        self._all_values = values
        self._fields = fields
        self._names: set[str] = set()
        self._constants: list[Any] = []
        self._atoms: list[re.Match[str]] = []
        self._values: dict[str, Sequence[Any]] = {}
        shown = printable(expression[: _SHOWN + 1])
        self.shown = f'where="{shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."}"'
        if len(expression) > _LONGEST:
            raise self._error(f"it has {len(expression):,} characters; the limit is {_LONGEST:,}")
        self._spelled = "".join(map(self._spell, _ATOM.finditer(expression))).strip()

    def test(self) -> Test:
        """Return a function that evaluates the expression for an object. Raises UserError if it is invalid."""
        return self._condition(self._parsed(), 0)

    def conjuncts(self) -> tuple[Conjunct, ...]:
        """Return the conditions that `and` joins; all of them hold where the expression does.

        Raises UserError if the expression is invalid.
        """
        tree, conjuncts = [self._parsed()], []
        while tree:
            node = tree.pop()
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
                tree += reversed(node.values)
                continue
            self._names, self._constants = set(), []
            test = self._condition(node, 0)
            conjuncts.append(Conjunct(test, frozenset(self._names), tuple(self._constants)))
        return tuple(conjuncts)

    def _parsed(self) -> ast.expr:
        try:
            return ast.parse(self._spelled, mode="eval").body
        except (SyntaxError, RecursionError, MemoryError):
            raise self._error("it cannot be read as conditions with 'and' or 'or' between them") from None

    def _spell(self, match: re.Match[str]) -> str:
        """Return a token as the parser gets it; numbers, text and words become the placeholders `_0_`, `_1_`, ..."""
        kind, token = match.lastgroup, match[0]
        if kind == "unknown":
            raise self._error(f"{match.string[match.start() : match.start() + 12].rstrip()!r} is not supported")
        if kind == "sign":
            return "==" if token == "=" else " " if token.isspace() else token
        if token in _KEYWORDS:
            return f" {token} "
        self._atoms.append(match)
        return f" _{len(self._atoms) - 1}_ "

    def _condition(self, node: ast.expr, depth: int) -> Test:
        if depth > _DEEPEST:
            raise self._error("it is nested too deeply")
        match node:
            case ast.BoolOp(op, values):
                tests = [self._condition(value, depth + 1) for value in values]
                if isinstance(op, ast.Or):
                    return lambda subject: any(test(subject) for test in tests)
                return lambda subject: all(test(subject) for test in tests)
            case ast.UnaryOp(ast.Not(), operand):
                test = self._condition(operand, depth + 1)
                return lambda subject: not test(subject)
            case ast.Compare(left, ops, comparators):
                sides = [left, *comparators]
                tests = [self._comparison(*pair) for pair in zip(sides, ops, comparators, strict=False)]
                return tests[0] if len(tests) == 1 else lambda subject: all(test(subject) for test in tests)
            case ast.Name():
                field = self._operand(node)
                if field.name is None:
                    # A word on its own can only be meant as a field.
                    self._no_field(field.constant)
                return lambda subject: bool(field.get(subject))
        raise self._unexpected(node)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Test:
        field = self._operand(left)
        if not isinstance(op, (ast.In, ast.NotIn)):
            return self._compare(field, type(op), self._operand(right))
        if not isinstance(right, ast.Tuple) and not self._spelled[: right.col_offset].rstrip().endswith("("):
            raise self._error("a '(' is missing")
        choices = right.elts if isinstance(right, ast.Tuple) else [right]
        if not choices:
            raise self._unexpected(right)
        tests = [self._compare(field, ast.Eq, self._operand(choice)) for choice in choices]
        negated = isinstance(op, ast.NotIn)
        return lambda subject: any(test(subject) for test in tests) != negated

    def _compare(self, left: _Operand, op: type[ast.cmpop], right: _Operand) -> Test:
        if left.name is None and right.name is None:
            self._no_field(left.constant if isinstance(left.constant, str) else right.constant)
        if left.name is not None and right.name is None:
            right = self._checked(left, right, op)
        if right.name is not None and left.name is None:
            left = self._checked(right, left, op)
        compare, ordered = _COMPARISONS[op], op in _SIGNS

        def test(of: Any) -> bool:
            value, bound = left.get(of), right.get(of)
            if ordered and (value is None or bound is None or _kind(value) != _kind(bound)):
                return False
            return compare(value, bound)

        return test

    def _checked(self, field: _Operand, constant: _Operand, op: type[ast.cmpop]) -> _Operand:
        """Return the constant if the field can be compared with it."""
        assert field.name is not None
        value = DTYPES.get(constant.constant, constant.constant) if field.name == "dtype" else constant.constant
        if field.name not in self._values:
            self._values[field.name] = self._all_values(field.name)
        values = self._values[field.name]
        if op in _SIGNS and any(_kind(value) != _kind(example) for example in values[:1]):
            types = f"{_kind(values[0])} with {_kind(value)}"
            raise self._error(f"{field.name} {_SIGNS[op]} {value!r} compares {types}, {field.name} is {values[0]!r}")
        if isinstance(value, str) and value not in values:
            choices = sorted(str(choice) for choice in values)
            raise self._error(
                f"{field.name} is never '{printable(value)}': "
                f"{nearest(value, choices)}its values are {', '.join(choices[:12]) or 'all missing'}"
            )
        self._constants.append(value)
        return _Operand(lambda _: value, None, value)

    def _operand(self, node: ast.expr) -> _Operand:
        if not isinstance(node, ast.Name):
            raise self._unexpected(node)
        match = self._atoms[int(node.id.strip("_"))]
        token = match[0]
        if match.lastgroup == "word" and token in self._known:
            self._names.add(token)
            return _Operand(typed_lists(self._known[token]), token)
        value: Any
        if match.lastgroup == "number":
            value = float(token.replace("_", ""))
        else:
            value = token[1:-1] if match.lastgroup == "text" else _CONSTANTS.get(token.lower(), token)
        return _Operand(lambda _: value, None, value)

    def _no_field(self, name: Any) -> None:
        """Raise the error for a condition without a field; for a word, suggest the nearest field."""
        if isinstance(name, str) and name not in self._known:
            raise unknown_field(name, nearest(name, self._known), self.shown, self._fields)
        raise self._error("a condition needs a field")

    def _unexpected(self, node: ast.expr) -> UserError:
        spelled = ast.get_source_segment(self._spelled, node) or ""
        typed = re.sub(r" ?_(\d+)_ ?", lambda match: self._atoms[int(match[1])][0], spelled)
        return self._error(f"'{printable(typed)[:40]}' is not supported")

    def _error(self, what: str) -> UserError:
        return UserError(f"{self.shown} is not a valid filter: {what}; {_EXAMPLE}")


def unknown_field(name: str, near: str, key: str, fields: str) -> UserError:
    """Return the error about a name that the user typed after `key` and that is no field.

    `near` is the question about the nearest one, if any is near; else `fields` lists some.
    """
    return UserError(f"{key} names an unknown field '{name}': {near.rstrip() or fields}")


def typed_lists(get: Getter) -> Getter:
    """Return a getter that turns lists into the text a user would type, `[512,1536]`."""

    def typed(subject: Any) -> Any:
        value = get(subject)
        return word(value) if isinstance(value, (tuple, list)) else value

    return typed


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, (int, float)) else "text"
