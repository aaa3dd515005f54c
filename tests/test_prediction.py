"""Times that are predicted for shapes that were not measured, by the kept measurements of an H200."""

import ast
import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import sweeps

from attn_exp.core.case import Case
from attn_exp.core.case_fields import case_columns
from attn_exp.core.hardware import datasheet_peak
from attn_exp.core.prediction import LEAST_CASES, Known, Predictor, Rates, beyond

KEPT = Path(__file__).parents[1] / "results" / "h200"
PEAK = datasheet_peak("NVIDIA H200")
RATES = Rates(PEAK.flops["bfloat16"], PEAK.bytes_per_s)
# Each is left out of one of so many predictions, with all that has its case.
FOLDS = 6


def kept():
    """The times in the kept tables, by backend and pass."""
    found = defaultdict(list)
    for path in sorted(KEPT.glob("*/*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                if not {"q_heads", "forward/time_us"} <= row.keys() or row["status"] != "ok":
                    continue
                if row["compile"] != "none" or row.get("workload"):
                    continue
                texts = {name: row[name] for name in case_columns() if row.get(name)}
                texts["causal"] = row["causal"].lower()
                for name in ("lengths", "kv_lengths"):
                    if name in texts:
                        texts[name] = ast.literal_eval(texts[name])
                case = msgspec.convert(texts, Case, strict=False)
                for side in ("forward", "backward"):
                    if row.get(f"{side}/time_us"):
                        low, time, high = (float(row[f"{side}/time_{of}us"]) for of in ("low_", "", "high_"))
                        found[row["backend"], side].append(Known(case, time, math.log(high / low) / 2))
    return found


def held_out(known, side):
    """Each known time with what the other folds predict for its case."""
    cases = list(dict.fromkeys(one.case for one in known))
    folds = {case: at % FOLDS for at, case in enumerate(cases)}
    for fold in range(FOLDS):
        predictor = Predictor([one for one in known if folds[one.case] != fold], side, RATES)
        predicted = {case: predictor.predict(case) for case in cases if folds[case] == fold}
        yield from ((one, predicted[one.case]) for one in known if one.case in predicted)


def test_intervals_of_held_out_shapes_cover_what_was_measured():
    pairs = []
    for (_, side), known in kept().items():
        if len({one.case for one in known}) >= 3 * LEAST_CASES:
            pairs += held_out(known, side)
    covered = [found.low_us <= one.time_us <= found.high_us for one, found in pairs]
    assert len(covered) > 400
    assert sum(covered) / len(covered) >= 0.93
    # An interval that contains everything would say nothing.
    halves = sorted(found.half for _, found in pairs)
    misses = sorted(abs(math.log(one.time_us / found.time_us)) for one, found in pairs)
    assert halves[len(halves) // 2] < 0.35
    assert misses[len(misses) // 2] < 0.10


def grid(time_us, lengths=(256, 512, 1024, 2048, 4096), heads=(16, 64)):
    """Known times of a function of a case."""
    cases = [sweeps.case(seq_len=length, batch=1, q_heads=n, kv_heads=n) for length in lengths for n in heads]
    return [Known(case, time_us(case), 0.002) for case in cases]


def test_a_smooth_time_is_met_within_its_interval():
    def time_us(case):
        return 5 + RATES.time_us(case, "forward") * (1.6 + 0.8 * math.exp(-case.q_len / 1500))

    predictor = Predictor(grid(time_us), "forward", RATES)
    for length in (300, 700, 1500, 3000):
        case = sweeps.case(seq_len=length, batch=2, q_heads=16, kv_heads=16)
        found = predictor.predict(case)
        assert found.beyond == ()
        assert found.low_us < time_us(case) < found.high_us
        assert found.time_us == pytest.approx(time_us(case), rel=0.05)


def test_beyond_what_was_measured_is_said_and_wider():
    predictor = Predictor(grid(lambda case: 3 * RATES.time_us(case, "forward") + 4), "forward", RATES)
    inside = predictor.predict(sweeps.case(seq_len=2000, batch=1))
    far = predictor.predict(sweeps.case(seq_len=65536, batch=1))
    assert far.beyond == ("q_len 65536 (measured up to 4096)", "kv_len 65536 (measured up to 4096)")
    assert far.half > 2 * inside.half
    other = sweeps.case(seq_len=1024, batch=1, dtype="float16", causal=False, q_heads=8, kv_heads=8)
    assert beyond(other, predictor.cases) == ("batch x q_heads 8 (measured from 16)", "dtype float16", "mask full")


def test_several_times_of_a_case_are_one_case():
    known = grid(lambda case: 3 * RATES.time_us(case, "forward") + 4)
    twice = known + [replace(one, time_us=1.02 * one.time_us) for one in known]
    predictor = Predictor(twice, "forward", RATES)
    assert len(predictor.cases) == len(known) and len(predictor.left_out()) == len(known)
    with pytest.raises(ValueError, match=f"{LEAST_CASES - 1} measured cases are too few"):
        Predictor([one for one in twice if one.case in predictor.cases[: LEAST_CASES - 1]], "forward", RATES)


def test_a_left_out_case_is_predicted_by_the_others():
    def time_us(case):
        return 4 + 3 * RATES.time_us(case, "forward")

    known = grid(time_us)
    known[4] = replace(known[4], time_us=2 * known[4].time_us)
    misses = Predictor(known, "forward", RATES).left_out()
    assert misses[known[4].case] == pytest.approx(math.log(2), rel=0.2)
    assert max(misses, key=lambda case: misses[case]) == known[4].case
