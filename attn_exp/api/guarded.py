"""Steps of `attn_exp.assert_not_slower` and `assert_correct`: tensors for a case, a duel of functions, its verdict."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attn_exp.api.timed import CHOICES, Asked, Timed, case_of, label_of, measured_alike, overrides_of, request_of
from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.overrides import hydra_aside, override_key
from attn_exp.config.request import request_from_config
from attn_exp.core.case.case import Case
from attn_exp.core.case.features import FEATURES
from attn_exp.core.case.fields import case_columns
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.host.nvml import visible_gpus
from attn_exp.core.record.flags import FLAGS
from attn_exp.core.record.record import Record
from attn_exp.core.stats.paired import PairedComparison
from attn_exp.core.values import share
from attn_exp.execution.duel import BUDGET_S, BUSY_MARGIN, compare_pairs, interference
from attn_exp.results.calibration import device_key, margin_for
from attn_exp.results.result import result_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import torch

    # q, k and v; or a case as overrides, `"batch=2 causal=true"` or `{"batch": 2}`, whose tensors are drawn.
    Given: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | str | Mapping[str, Any]

Outcome = Literal["not slower", "slower", "undecided"]
# The keys of `attn-exp run` that say a case, and how its tensors are drawn.
_OF_MODEL = ("q_heads", "kv_heads", "head_dim", "value_dim", "lengths", "kv_lengths", "workload", "mlp_dim")
_OF_CASE = (
    *("model", "dtype", "seq_len", "embed_dim", "mask", "device", "seed"),
    *(name for name in case_columns() if name not in _OF_MODEL),
)
# A judgement needs timed calls, and few of them.
_BRIEF = {"min_rounds": 2, "max_rounds": 2, "budget_s": 0.01}


@dataclass(frozen=True)
class Guarded:
    """Findings of a duel of a function with another one.

    Attributes:
        verdict: `not slower`, `slower`, or `undecided`: the worst of the passes.
        passes: the verdict of each pass. Its `.effect` is the function's time over the other's, minus 1, with a 95 %
            interval from `.low` to `.high`.
        sentences: a sentence for each pass.
        records: the function's record and the other's, samples included.
    """

    verdict: Outcome
    passes: Mapping[str, tuple[Outcome, PairedComparison]]
    sentences: tuple[str, ...]
    records: tuple[Record, Record]

    def __str__(self) -> str:
        return "; ".join(self.sentences)


def guarded(
    function: "Callable[..., torch.Tensor]",
    than: "Callable[..., torch.Tensor]",
    given: "Given",
    asked: Asked,
    *,
    margin: float | str,
    undecided: str,
) -> Guarded:
    """Measure a function and the one to compare with; see `attn_exp.assert_not_slower`, which names the errors."""
    least = share("margin", margin)
    if undecided not in ("fail", "warn"):
        raise UserError(f"undecided={undecided!r} is not known: write 'fail' or 'warn'")
    for name, callee in (("the function", function), ("than", than)):
        if not callable(callee):
            raise UserError(f"{name} is a {type(callee).__name__}: give a function of q, k and v")
    case, tensors = _case_and_tensors(given, asked)
    names = [label_of(function), label_of(than)]
    if names[0] == names[1]:
        names[1] += "_baseline"
    # As precise as the margin needs: a third of it.
    asked = asked.unless(stopping={"budget_s": BUDGET_S, "precision": least / 3})
    requests = [
        request_of(callee, case, tensors, asked, name=name, sweep="guard")
        for callee, name in zip((function, than), names, strict=True)
    ]
    records = measured_alike(requests, [function, than], tensors, asked)
    for record in records:
        if record.status != "ok":
            failure = f"{record.request.backend['name']} is {record.status} on {case.label()}: {record.reason}"
            raise AssertionError(f"nothing can be compared, {failure}")
    return verdict_of((records[0], records[1]), max(least, margin_for(device_key(records[0].environment))))


def verdict_of(records: tuple[Record, Record], margin: float) -> Guarded:
    """Return whether the first of two functions that were measured interleaved is slower than the second.

    Slower is decided as in a duel. It is not slower if the interval rules out the margin, also if other programs that
    interfered made it look faster than it is.
    """
    within = (1 + margin) / (1 + BUSY_MARGIN) - 1 if interference(records) else margin
    passes: dict[str, tuple[Outcome, PairedComparison]] = {}
    mine, base = records
    for direction in mine.request.measuring.passes:
        # The ratio is that of the second over the first.
        (pair,) = compare_pairs([base, mine], direction, margin)
        outcome: Outcome = "undecided"
        if pair.verdict == "faster":
            outcome = "slower"
        elif pair.high < within:
            outcome = "not slower"
        passes[direction] = outcome, pair
    outcomes = [outcome for outcome, _ in passes.values()]
    worst = next(verdict for verdict in ("slower", "undecided", "not slower") if verdict in outcomes)
    sentences = (_sentence(records, direction, *pair, margin) for direction, pair in passes.items())
    return Guarded(worst, passes, tuple(sentences), records)


def _sentence(
    records: tuple[Record, Record], direction: str, outcome: Outcome, pair: PairedComparison, margin: float
) -> str:
    mine, base = (record.request.backend["name"] for record in records)
    ratio, low, high = (f"{1 + effect:.3f}" for effect in (pair.effect, pair.low, pair.high))
    sentence = f"{direction} of {records[0].request.case.label()}: {mine} takes {ratio} times as long as {base}"
    sentence += f" [95 % CI: {low}, {high}] in {pair.rounds} rounds, "
    if outcome == "slower":
        return f"{sentence}slower by {100 * pair.margin:.3g} % or more"
    if outcome == "not slower":
        return f"{sentence}not slower by {100 * margin:.3g} %"
    sentence += f"so it is undecided whether it is slower by {100 * margin:.3g} %"
    if seen := interference(records):
        return f"{sentence}: {FLAGS[seen[0]][1]}, and equal functions may differ by {100 * BUSY_MARGIN:.3g} % then"
    return f"{sentence}: more rounds may decide, with stopping={{'budget_s': {6 * BUDGET_S}, 'max_rounds': 400}}"


def judged(function: "Callable[..., torch.Tensor]", given: "Given", asked: Asked) -> Timed:
    """Judge a function; see `attn_exp.assert_correct`. Raises UserError for a mistake in the arguments."""
    if not callable(function):
        raise UserError(f"the function is a {type(function).__name__}: give a function of q, k and v")
    case, tensors = _case_and_tensors(given, asked)
    request = request_of(function, case, tensors, asked.unless(stopping=_BRIEF), name=None, sweep="guard")
    (record,) = measured_alike([request], [function], tensors, asked)
    return Timed(record, result_of(record))


def _case_and_tensors(given: "Given", asked: Asked) -> "tuple[Case, tuple[torch.Tensor, ...]]":
    """Return a case, and q, k and v of it: those that were given, or drawn ones."""
    if isinstance(given, (tuple, list)):
        if len(given) != 3:
            raise UserError(f"the case has {len(given)} tensors: give (q, k, v)")
        return case_of(tuple(given), asked), tuple(given)
    if asked.causal or asked.align is not None:
        raise UserError("causal= and align= are for tensors of your own: write them into the case, as causal=true")
    case, device, seed = _composed(given)
    if case.quantised or case.lengths is not None:
        kind = "packed sequences" if case.lengths is not None else case.dtype
        raise UserError(f"a function of q, k and v cannot be told about {kind}: choose another case")
    from attn_exp.worker.given import draw_tensors

    return case, draw_tensors(case, device, seed)


def _composed(given: str | Mapping[str, Any]) -> tuple[Case, str, int]:
    """Return a case, where its tensors are to be drawn, and their seed."""
    if isinstance(given, str):
        overrides = shlex.split(given)
    elif isinstance(given, Mapping):
        overrides = overrides_of(given)
    else:
        raise UserError(f"the case is a {type(given).__name__}: give (q, k, v), or text as 'batch=2 seq_len=512'")
    for override in overrides:
        key = override_key(override)
        if key.partition(".")[0] in _OF_CASE:
            continue
        if key.partition(".")[0] in CHOICES:
            raise UserError(f"{key} is no part of a case but how to measure: give it as an argument, {key}=...")
        raise UserError(f"{key} is no key of a case: {nearest(key, _OF_CASE)}its keys are {', '.join(_OF_CASE)}")
    with hydra_aside():
        config = resolved_config(compose_config(overrides, "guard"), overrides)
    request = request_from_config(config, visible_gpus())
    for field in ("sink", "bias", "latent", "page_size"):
        if getattr(request.case, field):
            raise UserError(f"a function of q, k and v {FEATURES[field].has_not()}")
    return request.case, request.device, request.measuring.seed
