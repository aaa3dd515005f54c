"""Fields: the names that `where=`, `by=` and `sort=` accept, and how to get their values from a cell."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from attn_exp.core.case.case import PASSES
from attn_exp.core.case.fields import case_columns
from attn_exp.core.case.filter import Filter, Getter, typed_lists, unknown_field
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.record.flags import FLAGS
from attn_exp.core.record.metrics import METRICS
from attn_exp.core.source import short
from attn_exp.core.text import word
from attn_exp.results.cell import Cell, metric_names

Item = TypeVar("Item")
# How a job was measured, as far as it tells rows of one case apart.
OF_MEASURING = ("timer", "regime", "l2", "inputs", "accumulate", "gold")
_OWN: dict[str, Getter] = {
    "backend": lambda cell: cell.result.label,
    "model": lambda cell: cell.result.model,
    "status": lambda cell: cell.result.status,
    "pass": lambda cell: cell.direction,
    "seq_len": lambda cell: max(cell.result.case.q_len, cell.result.case.kv_len),
    "embed_dim": lambda cell: cell.result.case.embed_dim,
    "device": lambda cell: cell.result.device,
    **{name: attrgetter(f"result.measuring.{name}") for name in OF_MEASURING},
    "caches": lambda cell: cell.result.caches,
    "source": lambda cell: short(cell.result.source),
    "sweep": lambda cell: cell.result.sweep,
    "job": lambda cell: cell.result.job,
    "gpu": lambda cell: cell.result.device_name,
    "gpu_uuid": lambda cell: cell.result.environment.get("gpu_uuid"),
    "method_version": lambda cell: cell.result.method_version,
    "power_limit_w": lambda cell: cell.result.environment.get("power_limit_w"),
}
NAMED = (*_OWN, *case_columns())
# As the message about an unknown field lists them.
FIELDS = f"the fields are {', '.join(NAMED)}, flags and metrics"


def fields(cells: Sequence[Cell]) -> dict[str, Getter]:
    """Return the getter of every field name.

    Fields are those of a case and of a record, its flags (true or false) and its backend's options (`backend.NAME`).
    Metrics have a pass (`forward/time_us`) or are of the cell's own pass (`time_us`).
    """
    results = {id(cell.result): cell.result for cell in cells}.values()
    # Facts are known even if nobody measured them: nothing has them then.
    metrics = metric_names(results) | {one.name for one in METRICS.values() if one.is_fact}
    options = {name for result in results for name in result.backend if name not in ("_target_", "name")}
    getters: dict[str, Getter] = {f"{side}/{name}": _metric(f"{side}/{name}") for side in PASSES for name in metrics}
    getters |= {name: _own_metric(name) for name in metrics}
    getters |= {f"backend.{name}": _option(name) for name in options}
    getters |= {name: _flag(name) for name in FLAGS}
    getters |= {name: attrgetter(f"result.case.{name}") for name in case_columns()}
    return getters | _OWN


def getter(name: str, known: dict[str, Getter], key: str) -> Getter:
    """Return the getter of a field name that the user typed after `key`. Raises UserError if there is no such field."""
    if name not in known:
        raise unknown_field(name, nearest(name, known), key, FIELDS)
    return known[name]


def kept_by(
    expression: str, items: Sequence[Item], known: Mapping[str, Getter], shown: str = FIELDS, noun: str = "cells"
) -> list[Item]:
    """Return the items for which an expression over the fields `known` holds; messages list these as `shown`.

    Raises UserError if the expression is invalid, names an unknown field, or holds for no item.
    """

    def values(name: str) -> list[Any]:
        return [value for value in distinct(map(typed_lists(known[name]), items)) if value is not None]

    filter_ = Filter(expression, known, values, shown)
    test = filter_.test()
    kept = [item for item in items if test(item)]
    if not kept:
        raise UserError(f"{filter_.shown} matches none of the {len(items)} {noun}: relax it")
    return kept


def sortable(value: Any) -> tuple[str, Any]:
    """Return a sort key for values of several types: numbers first, each type by itself, None last."""
    if isinstance(value, (bool, int, float)):
        return ("", value)
    return ("~", "") if value is None else (type(value).__name__, value)


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the distinct values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def _metric(name: str) -> Getter:
    return lambda cell: cell.result.metrics.get(name)


def _own_metric(name: str) -> Getter:
    return lambda cell: cell.result.metrics.get(f"{cell.direction}/{name}")


def _option(name: str) -> Getter:
    def get(cell: Any) -> Any:
        value = cell.result.backend.get(name)
        # Lists and mappings are compared, grouped and sorted as the text that a user would type.
        return word(value) if isinstance(value, (list, dict)) else value

    return get


def _flag(name: str) -> Getter:
    return lambda cell: name in cell.result.flags
