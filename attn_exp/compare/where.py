"""Select cells with a filter expression such as `causal and seq_len >= 4096`; parsed with `ast`, never evaluated.

An expression consists of comparisons (`== = != < <= > >=`, `in (a, b)`, `not in (a, b)`), `and`, `or`, `not` and
parentheses. Operands are fields, numbers, quoted text, `true`, `false` and `none`. A word that is not a field is text,
so `backend == flash` needs no quotes. `<`, `<=`, `>` and `>=` are false for a missing value, such as a metric of a
failed job.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_exp.compare.sheet import printable
from attn_exp.core.case import DTYPES
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.text import word
from attn_exp.results.cell import Cell
from attn_exp.results.fields import Getter, distinct, fields, getter

Test = Callable[[Cell], bool]
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


def chosen(cells: Sequence[Cell], expression: str) -> list[Cell]:
    """Return the cells for which the expression holds.

    Raises:
        UserError: the expression is invalid, names an unknown field, or holds for no cell.
    """
    filter_ = _Filter(expression, cells)
    test = filter_.test()
    kept = [cell for cell in cells if test(cell)]
    if not kept:
        raise UserError(f"{filter_.shown} matches none of the {len(cells)} cells: relax it")
    return kept


class _Filter:
    """A filter expression: Python parses it, and only a few node types of its syntax tree are accepted."""

    def __init__(self, expression: str, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._known = fields(cells)
        self._atoms: list[re.Match[str]] = []
        self._values: dict[str, list[Any]] = {}
        shown = printable(expression[: _SHOWN + 1])
        self.shown = f'where="{shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."}"'
        if len(expression) > _LONGEST:
            raise self._error(f"it has {len(expression):,} characters; the limit is {_LONGEST:,}")
        self._spelled = "".join(map(self._spell, _ATOM.finditer(expression))).strip()

    def test(self) -> Test:
        """Return a function that evaluates the expression for a cell."""
        try:
            tree = ast.parse(self._spelled, mode="eval")
        except SyntaxError as error:
            raise self._error(self._reason(error)) from None
        except (RecursionError, MemoryError):
            raise self._error("it is nested too deeply") from None
        return self._condition(tree.body, 0)

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

    def _reason(self, error: SyntaxError) -> str:
        if "never closed" in error.msg:
            return "a ')' is missing"
        if "too many nested" in error.msg:
            return "it is nested too deeply"
        if not error.offset or not error.end_offset:
            return "it is incomplete"
        place = self._typed(self._spelled[error.offset - 1 : error.end_offset - 1] or self._spelled[error.offset - 1])
        return f"'and' or 'or' is missing in {place}" if "comma" in error.msg else f"{place} is unexpected"

    def _condition(self, node: ast.expr, depth: int) -> Test:
        if depth > _DEEPEST:
            raise self._error("it is nested too deeply")
        match node:
            case ast.BoolOp(op, values):
                tests = [self._condition(value, depth + 1) for value in values]
                if isinstance(op, ast.Or):
                    return lambda cell: any(test(cell) for test in tests)
                return lambda cell: all(test(cell) for test in tests)
            case ast.UnaryOp(ast.Not(), operand):
                test = self._condition(operand, depth + 1)
                return lambda cell: not test(cell)
            case ast.Compare(left, ops, comparators):
                sides = [left, *comparators]
                tests = [self._comparison(*pair) for pair in zip(sides, ops, comparators, strict=False)]
                return tests[0] if len(tests) == 1 else lambda cell: all(test(cell) for test in tests)
            case ast.Name():
                field = self._operand(node)
                if field.name is None:
                    # A word on its own can only be meant as a field.
                    self._no_field(field.constant)
                return lambda cell: bool(field.get(cell))
        raise self._unexpected(node)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Test:
        one = self._operand(left)
        if not isinstance(op, (ast.In, ast.NotIn)):
            return self._compare(one, type(op), self._operand(right))
        if not isinstance(right, ast.Tuple) and not self._spelled[: right.col_offset].rstrip().endswith("("):
            raise self._error("a '(' is missing")
        choices = right.elts if isinstance(right, ast.Tuple) else [right]
        if not choices:
            raise self._unexpected(right)
        tests = [self._compare(one, ast.Eq, self._operand(choice)) for choice in choices]
        negated = isinstance(op, ast.NotIn)
        return lambda cell: any(test(cell) for test in tests) != negated

    def _compare(self, left: _Operand, op: type[ast.cmpop], right: _Operand) -> Test:
        if left.name is None and right.name is None:
            self._no_field(left.constant if isinstance(left.constant, str) else right.constant)
        if left.name is not None and right.name is None:
            right = self._checked(left, right, op)
        if right.name is not None and left.name is None:
            left = self._checked(right, left, op)
        compare, ordered = _COMPARISONS[op], op in _SIGNS

        def test(cell: Cell) -> bool:
            one, other = left.get(cell), right.get(cell)
            if ordered and (one is None or other is None or _kind(one) != _kind(other)):
                return False
            return compare(one, other)

        return test

    def _checked(self, field: _Operand, constant: _Operand, op: type[ast.cmpop]) -> _Operand:
        """Return the constant if the field can be compared with it."""
        assert field.name is not None
        value = DTYPES.get(constant.constant, constant.constant) if field.name == "dtype" else constant.constant
        there = self._values_of(field.name)
        if op in _SIGNS and any(_kind(value) != _kind(other) for other in there[:1]):
            types = f"{_kind(there[0])} with {_kind(value)}"
            raise self._error(f"{field.name} {_SIGNS[op]} {value!r} compares {types}, {field.name} is {there[0]!r}")
        if isinstance(value, str) and value not in there:
            choices = sorted(str(other) for other in there)
            raise self._error(
                f"{field.name} is never '{printable(value)}': "
                f"{nearest(value, choices)}its values are {', '.join(choices[:12]) or 'all missing'}"
            )
        return _Operand(lambda _: value, None, value)

    def _values_of(self, name: str) -> list[Any]:
        """Return the distinct values of a field over the cells, without None."""
        if name not in self._values:
            values = distinct(map(_typed_lists(self._known[name]), self._cells))
            self._values[name] = [value for value in values if value is not None]
        return self._values[name]

    def _operand(self, node: ast.expr) -> _Operand:
        if not isinstance(node, ast.Name):
            raise self._unexpected(node)
        match = self._atoms[int(node.id.strip("_"))]
        token = match[0]
        if match.lastgroup == "word" and token in self._known:
            return _Operand(_typed_lists(self._known[token]), token)
        value: Any
        if match.lastgroup == "number":
            value = float(token.replace("_", ""))
        else:
            value = token[1:-1] if match.lastgroup == "text" else _CONSTANTS.get(token.lower(), token)
        return _Operand(lambda _: value, None, value)

    def _no_field(self, name: Any) -> None:
        """Raise the error for a condition without a field; for a word, suggest the nearest field."""
        if isinstance(name, str):
            getter(name, self._known, self.shown)
        raise self._error("a condition needs a field")

    def _unexpected(self, node: ast.expr) -> UserError:
        return self._error(f"{self._typed(ast.get_source_segment(self._spelled, node) or '')} is not supported")

    def _typed(self, spelled: str) -> str:
        """Return a part of the parsed text as the user typed it, quoted."""
        typed = re.sub(r" ?_(\d+)_ ?", lambda match: self._atoms[int(match[1])][0], spelled)
        return f"'{printable(typed)[:40]}'"

    def _error(self, what: str) -> UserError:
        return UserError(f"{self.shown} is not a valid filter: {what}; {_EXAMPLE}")


def _typed_lists(get: Getter) -> Getter:
    """Return a getter that turns lists into the text a user would type, `[512,1536]`."""

    def typed(cell: Cell) -> Any:
        value = get(cell)
        return word(value) if isinstance(value, (tuple, list)) else value

    return typed


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, (int, float)) else "text"
