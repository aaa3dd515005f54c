"""Duel: measure two or more backends of one case interleaved, in processes in a row, and decide about each pair."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from attn_exp.config.compose import compose_config, new_sweep_name, resolved_config
from attn_exp.config.request import request_from_config
from attn_exp.core.errors import UserError
from attn_exp.core.files import remove, write_whole
from attn_exp.core.host.hardware import datasheet_peak
from attn_exp.core.host.nvml import GpuInfo, visible_gpus
from attn_exp.core.live_line import LiveLine
from attn_exp.core.record.file import FILE_NAME, VERDICTS_NAME, write_record
from attn_exp.core.record.flags import FLAGS, INTERFERENCE
from attn_exp.core.record.metrics import pass_metrics, ranking_medians
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import DUEL_NAME, Request, backend_label
from attn_exp.core.redaction import redacted
from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.stats.paired import PairedComparison, compare_all
from attn_exp.core.text import at_width, half_text, percent_text
from attn_exp.execution.context import SweepContext, open_context
from attn_exp.execution.job_queue import JobQueue
from attn_exp.plots.samples import plot_ratios
from attn_exp.results.calibration import device_key, margin_for
from attn_exp.results.store import user_path
from attn_exp.results.table import time_text

# More than equal backends were observed to differ by on a busy machine.
BUSY_MARGIN = 0.25
# The budget of each pass: a duel may take longer than a job of a sweep, in order to decide.
BUDGET_S = 5
# The addresses of a process's memory make its calls faster or slower by nearly 1 %: so many share the rounds.
PROCESSES = 4


def compare_pairs(records: Sequence[Record], direction: str, margin: float) -> list[PairedComparison]:
    """Compare all pairs of rivals in one pass by the medians of their rounds.

    Interference by other programs lasts longer than a round: then only differences whose whole interval is beyond
    `BUSY_MARGIN` count, and nothing is called equivalent.
    """
    medians = [ranking_medians(record, direction) for record in records]
    if not interference(records):
        return compare_all(medians, margin)
    return [
        pair if pair.low >= pair.margin or pair.high <= _below(pair.margin) else replace(pair, verdict="undecided")
        for pair in compare_all(medians, max(margin, BUSY_MARGIN))
    ]


def _below(margin: float) -> float:
    """Return the margin of times that are shorter: the same on the log scale."""
    return 1 / (1 + margin) - 1


def interference(records: Sequence[Record]) -> list[str]:
    """Return the interference flags: other programs ran on the device."""
    return sorted(INTERFERENCE.intersection(flag for record in records for flag in record.flags))


def run_duel(
    rivals: Mapping[str, Sequence[str]],
    shared: Sequence[str],
    own_choices: Path | None,
    arguments: Sequence[str],
    line: LiveLine,
) -> bool:
    """Measure the rivals, and print the verdicts on each pair by pass; return whether there are any, or a dry run.

    `rivals` are the overrides of each rival by its letter, `shared` those of all, and `arguments` the command line as
    typed, for `command.txt`. Raises UserError if a choice does not exist, or the folder cannot be written.
    """
    name = new_sweep_name("duel-")
    gpus = visible_gpus()
    configs = {
        letter: compose_config([*choices, f"stopping.budget_s={BUDGET_S}", *shared], name, own_choices)
        for letter, choices in rivals.items()
    }
    resolved = {letter: resolved_config(config, [*rivals[letter], *shared]) for letter, config in configs.items()}
    requests = [_request(letter, config, gpus) for letter, config in resolved.items()]
    first = next(iter(configs.values()))
    # Text that is printed now would stand behind its line.
    line.close()
    if first.dry_run:
        print("\n".join(f"would run {request.label}: {request.case.label()}" for request in requests))
        return True
    options = next(iter(resolved.values()))
    # A duel has a process of its own, and MLflow has sweeps only.
    options["isolation"] |= {"name": "warm"}
    options["tracker"] = {"name": "none"}
    command = redacted(shlex.join(["attn-exp", "duel", *arguments]))
    context = open_context(options, command, print, kind="duel")
    line.show(f"measuring {' and '.join(request.label for request in requests)} side by side")
    try:
        records = _measure(context, requests, gpus, line)
    except BaseException:
        line.close()
        context.abandon("KILLED")
        raise
    # Importing what draws takes longer than drawing.
    line.show("drawing the plot")
    try:
        return _finish(context, records, line)
    finally:
        line.close()


def _finish(context: SweepContext, records: Sequence[Record], line: LiveLine) -> bool:
    """Print and store what was measured; return whether there are verdicts."""
    folder = context.folder

    def say(text: str) -> None:
        with line.aside():
            print(at_width(text, sys.stdout), flush=True)

    context.stop()
    measured = [record for record in records if record.status == "ok"]
    for record in records:
        if record.status != "ok":
            say(f"{record.status:<12} {record.request.label}: {record.reason}")
    if len(measured) < 2:
        say("there is nothing to compare: fewer than two rivals could be measured")
        return False
    margin = margin_for(device_key(measured[0].environment))
    by_pass = {
        direction: compare_pairs(measured, direction, margin) for direction in records[0].request.measuring.passes
    }
    text = report(measured, by_pass)
    say(text)
    verdicts = {
        direction: [
            asdict(pair) | {"a": measured[pair.a].request.label, "b": measured[pair.b].request.label}
            for pair in comparisons
        ]
        for direction, comparisons in by_pass.items()
    }
    write_whole(folder / "duel.txt", f"{text}\n".encode())
    write_whole(folder / VERDICTS_NAME, msgspec.json.format(msgspec.json.encode(verdicts), indent=1))
    plot_ratios(measured, by_pass, folder / "ratios.png")
    say(f"samples, verdicts and the plot are in {user_path(folder)}; attn-exp compare SWEEP counts this duel")
    return True


def _measure(
    context: SweepContext, requests: Sequence[Request], gpus: Sequence[GpuInfo], line: LiveLine
) -> list[Record]:
    """Measure the rivals in turns in one worker process after another; return the record of each."""
    isolation = context.start(requests[0].device, gpus)
    on_gpu = [replace(request, gpu_uuid=context.gpu_uuid) for request in requests]
    write_whole(context.folder / DUEL_NAME, msgspec.yaml.encode(on_gpu))
    queue = JobQueue(isolation, context.folder, context.gpu_uuid)
    parts_of: list[list[Record]] = [[] for _ in requests]
    going = list(range(len(requests)))
    # A rival that is left alone has no other to be compared with.
    while len(going) > 1 and len(parts_of[going[0]]) < PROCESSES:
        for number in going:
            remove(context.folder / requests[number].job / FILE_NAME)
        queue.submit([_part(requests[number]) for number in going])
        for number in going:
            parts_of[number].append(queue.record(queue.wait(lambda stage, folder: line.stage(stage))))
        isolation.close()
        going = [number for number in going if parts_of[number][-1].status == "ok"]
    records = [replace(joined(parts), request=request) for parts, request in zip(parts_of, on_gpu, strict=True)]
    for record in records:
        write_record(record, context.folder / record.request.job)
    return records


def _part(request: Request) -> Request:
    """Return what one process measures of a rival."""
    whole = request.measuring
    least, most = (math.ceil(rounds / PROCESSES) for rounds in (whole.min_rounds, whole.max_rounds))
    precision, budget_s = whole.precision * math.sqrt(PROCESSES), whole.budget_s / PROCESSES
    part = replace(whole, min_rounds=least, max_rounds=most, precision=precision, budget_s=budget_s)
    return replace(request, measuring=part)


def joined(parts: Sequence[Record]) -> Record:
    """Return the record of a rival with the rounds of all its processes, or the one that says why it failed."""
    last, passes, metrics = parts[-1], dict(parts[-1].passes), dict(parts[-1].metrics)
    # The numbers of a process's rounds begin alike for all rivals.
    most = last.request.measuring.max_rounds
    for direction in passes if last.status == "ok" else ():
        whole, *further = (part.passes[direction].timings[0] for part in parts)
        for index, timing in enumerate(further, 1):
            whole = replace(
                whole,
                times_us=whole.times_us + timing.times_us,
                rounds=whole.rounds + tuple(most * index + number for number in timing.rounds),
                blocks=whole.blocks + tuple((most * index + at, begin, end) for at, begin, end in timing.blocks),
                clocks_mhz=whole.clocks_mhz + timing.clocks_mhz,
                uncounted=whole.uncounted + timing.uncounted,
            )
        passes[direction] = replace(passes[direction], timings=(whole, *passes[direction].timings[1:]), paired=None)
        metrics |= pass_metrics(
            last.request.case, direction, passes[direction], saves_lse=last.request.measuring.with_gradients,
            ceilings=last.ceilings, peak=datasheet_peak(last.environment.get("gpu", "")), compiled=last.compiled,
        )  # fmt: skip
    flags = tuple(sorted({flag for part in parts for flag in part.flags}))
    return replace(last, passes=passes, metrics=metrics, flags=flags, started_at=parts[0].started_at)


def _request(letter: str, config: dict[str, Any], gpus: list[Any]) -> Request:
    request = request_from_config(config, gpus)
    if request.profilers:
        raise UserError("a duel only times: leave profiler=... out, and profile with python -m attn_exp")
    backend = backend_label(request.backend["name"], request.compile)
    # One backend with different options, or against itself, needs two folders.
    return replace(request, job=f"{letter}-{request.job}", label=f"{letter}={backend}")


def report(records: Sequence[Record], by_pass: dict[str, list[PairedComparison]]) -> str:
    """Return the printed report: times and clocks of all rivals, then a verdict for each pass and pair."""
    case = records[0].request.case
    lines = [f"{records[0].device_name}, {case.label()}, timer {records[0].request.measuring.timer}", ""]
    rows = []
    for record in records:
        for direction in by_pass:
            half = record.metrics.get(f"{direction}/time_half_width")
            rate = record.metrics.get(f"{direction}/tflops")
            clock = record.metrics.get(f"{direction}/clock_mhz")
            rows.append(
                {
                    "rival": record.request.label,
                    "pass": direction,
                    "time": time_text(record.metrics[f"{direction}/time_us"]),
                    "+-%": half_text(half),
                    "TFLOPS": "" if rate is None else f"{rate:.4g}",
                    "SM MHz": "" if clock is None else f"{clock:.0f}",
                    "flags": " ".join(record.flags),
                }
            )
    # A CPU has no SM clock.
    lines += [grid(sheet_of(rows)), ""]
    for direction, comparisons in by_pass.items():
        lines += [f"{direction:<9} {verdict_line(records, comparison)}" for comparison in comparisons]
    flags = interference(records)
    if not flags and any(pair.verdict == "undecided" for comparisons in by_pass.values() for pair in comparisons):
        lines.append("undecided: stopping.max_rounds and stopping.budget_s allow more rounds")
    for flag in flags:
        lines.append(f"{flag}: {FLAGS[flag][1]}, so only intervals beyond the margin count")
    return "\n".join(lines)


def verdict_line(records: Sequence[Record], comparison: PairedComparison) -> str:
    """Return one verdict as a line: which rival is faster, by how much, and the confidence interval."""
    first, second = (records[index].request.label for index in (comparison.a, comparison.b))
    decided = comparison.verdict in ("faster", "slower")
    how = f"takes {100 * abs(comparison.effect):.2f} % {'more' if comparison.effect > 0 else 'less'} time"
    # No direction without a verdict.
    effect = how if decided else f"takes {first}'s time {percent_text(comparison.effect)} %"
    margin = f"margin {100 * comparison.margin:.1f} %"
    if interference(records):
        # The side below zero is no mirror image in percent.
        margin = f"margin {100 * _below(comparison.margin):+.1f} to {100 * comparison.margin:+.1f} %"
    interval = f"[{percent_text(comparison.low)}, {percent_text(comparison.high)}]"
    figures = f"{effect} {interval}, {comparison.rounds} rounds, {margin}"
    if decided:
        return f"{first} is {comparison.verdict} than {second}: {second} {figures}"
    return f"{first} and {second} are {comparison.verdict}: {second} {figures}"
