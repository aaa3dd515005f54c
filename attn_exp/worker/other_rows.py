"""The rows of a batch whose reference is not computed: all are finite, and the output has a few right rows of each.

Calls on hard values are compared with the reference of one row of the batch. What is wrong in another one alone, as in
a path that a kernel takes for the last of them, shows here.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

import torch

from attn_exp.attention.expected import Expected
from attn_exp.attention.fresh_inputs import State
from attn_exp.attention.inputs import Inputs
from attn_exp.attention.probe import Place, Probe, allowed_error, probe_errors, usual_size
from attn_exp.core.case import Case
from attn_exp.core.text import apart

# Probes of each of a call's rows of the batch, and at most so many rows of the batch.
_PROBES, _MOST_ROWS = 2, 8


def wrong_in_other_rows(
    case: Case,
    values: Inputs,
    state: State,
    row: int,
    expected: Expected,
    results: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
) -> str | None:
    """Return what is wrong in the rows of the batch besides one, as a sentence, or None.

    Gradients are not compared: those of a few queries on hard values are known too badly.

    Args:
        case: the problem.
        values: its inputs.
        state: that of the inputs, in which no sign is changed.
        row: the row of the batch that was compared with a reference.
        expected: the reference of that row, whose tolerance holds for the others.
        results: the call's tensors by name.
        scales: the factors of those that are codes.
    """
    if case.batch == 1:
        return None
    found = _not_finite(results)
    if found is not None:
        return f"{found[0]} of row {found[1]} of the batch has values that are not finite"
    dice = random.SystemRandom()
    others = dice.sample([other for other in range(case.batch) if other != row], min(case.batch - 1, _MOST_ROWS))
    places = Place.drawn(case, dice, results["out"].device, _PROBES * len(others))
    placed = (replace(place, batch=others[index // _PROBES]) for index, place in enumerate(places))
    probes = [Probe(place, place.of(results["out"]), state, 0) for place in placed]
    allowed = allowed_error(expected.tolerances["out"].relative)
    errors = probe_errors(case, values, probes, "out", scales.get("out", 1.0), usual_size(expected.tensors["out"]))
    for probe, error in zip(probes, errors, strict=True):
        if error > allowed:
            place, (found_text, allowed_text) = probe.place, apart(error, allowed)
            return (
                f"{len(probe.rows)} rows of out in head {place.q_head} of row {place.batch} of the batch, drawn at "
                f"random, are off by {found_text} of their norm, allowed is {allowed_text}"
            )
    return None


def _not_finite(results: Mapping[str, torch.Tensor]) -> tuple[str, int] | None:
    """Return the name of a tensor and a row of the batch in which a value is not finite."""
    # A sum takes one kernel and no memory; sums of hard values stay far below the largest float32.
    finite = torch.stack([_sums(tensor) for tensor in results.values()]).isfinite().tolist()
    for name, rows in zip(results, finite, strict=True):
        if not all(rows):
            return name, rows.index(False)
    return None


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row of the batch, (batch,) in float32."""
    if tensor.element_size() == 1:
        return torch.stack([codes.float().sum() for codes in tensor])
    return tensor.sum((1, 2, 3), dtype=torch.float32)
