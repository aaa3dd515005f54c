"""python bench/pick_proof.py OUT: whether a dispatch table picks well where nothing was measured.

Sweeps a grid of shapes, decodes among them, and writes the table of it; then draws shapes at random between those of
the grid, times the backends side by side, and compares what the table picks with the fastest, with the backend that is
best if it is always called, and with SDPA's own choice. Then duels: transformer blocks, and a small Llama of
transformers with random weights (where transformers is installed), with the dispatcher against SDPA's own choice.
Writes `pick_proof.csv` and `pick_proof.txt` into the folder OUT beside the sweep; a second call with the same OUT keeps
its table.

`--again` judges the picks of today's code by the times that OUT has, also of rows that were added to its CSV from
another GPU, where `--skip` left out the shapes of the first.

Triton tunes itself for each shape, which takes a second, and flex compiles: a backend that the table has at more than
1.25 times the least time is timed in every eighth shape only, unless its mean over the table is within 1.25 times the
best one's. The shapes end when the seconds do (`--budget-s`); the text says how many there were. The duels come last.
"""

import argparse
import csv
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import attn_exp.dispatch
from attn_exp.attention.inputs import Inputs, make_inputs
from attn_exp.backends.base import Calls, DeclarativeBackend, calls_of, load_backend
from attn_exp.backends.sdpa import Sdpa
from attn_exp.core.case.case import Case
from attn_exp.core.conf import choice as choice_of
from attn_exp.core.dispatch_table import MODES, Choice, Chooser, DispatchTable, read_table
from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.stats.paired import MARGIN_FLOOR, compare_pair
from attn_exp.core.stats.summary import medians_by_round, summarize
from attn_exp.timers import make_timer
from attn_exp.timers.loop import Entry, sample_turns
from attn_exp.timers.stopping import StoppingRule
from attn_exp.worker.machine.device import Machine

HERE = Path(__file__).resolve().parent
SWEEP, SEED = "pick_proof", 1
# The grid, and what random shapes lie between: below 1,024 a length for each number of tiles of 128 but seven. A CPU's
# grid is only there to try this program.
GRIDS = {
    "cuda": {
        "batch": (1, 2, 3, 4), "heads": 16, "dims": (128,),
        "seq_len": (256, 304, 512, 600, 728, 1024, 2048, 4096, 8192),
    },
    "cpu": {"batch": (1, 2), "heads": 2, "seq_len": (32, 64, 128), "dims": (32,)},
}  # fmt: skip
BLOCKS = {
    "dit_block": ("model=flux", "workload=dit_block"),
    "decoder_layer": ("model=llama3_8b", "workload=decoder_layer", "seq_len=4096"),
}
FAR, ALL_OF = 1.25, 8
ROUNDS = StoppingRule(precision=0.0, min_rounds=8, max_rounds=8, budget_s=0.0)
MOST_SHAPES = 2000
# One of so many random shapes is a decode: one query, and a forward only.
DECODE_OF = 3
# What a table has to reach: how much slower than the fastest its picks may be in the geometric mean, and than SDPA's
# own choice in any shape; and which share of what the best constant choice is slower they avoid, if that is above GAP.
MEAN_LIMIT, OWN_LIMIT, CLOSED_LIMIT, GAP = 1.01, 1.03, 0.5, 1.01
OWN = "auto"
# A model whose attention has the shapes of the grid: batch, tokens, hidden size, layers.
MODELS = {"cuda": (2, 4096, 1024, 4), "cpu": (1, 64, 64, 2)}
MODEL_ROUNDS = StoppingRule(precision=0.0, min_rounds=20, max_rounds=20, budget_s=0.0)


class Picked(DeclarativeBackend):
    """The dispatcher as a backend, for duels."""

    supports = Sdpa.supports

    def __init__(self, name: str, table: str) -> None:
        super().__init__(name)
        self.table = table

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        """Load the table; each call looks its shape up."""
        attention = attn_exp.dispatch.load(self.table, other_gpu="warn").attention
        grouped = case.q_heads != case.kv_heads
        return calls_of(partial(attention, is_causal=not case.dense, enable_gqa=grouped), inputs)


@dataclass(frozen=True)
class Row:
    """A shape in a mode: what was picked, and the time of each backend that was timed."""

    case: Case
    mode: str
    choice: Choice
    times_us: dict[str, float]

    def slower(self, label: str | None = None) -> float:
        """How many times as long as the fastest a backend took, without a label the pick."""
        return self.times_us[label or self.choice.label or ""] / min(self.times_us.values())


def command(*words: str, out: Path) -> str:
    """The standard output of a command that must succeed; what it says beside goes to standard error."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    run = [sys.executable, "-m", "attn_exp", *words]
    return subprocess.run(run, cwd=out, check=True, text=True, stdout=subprocess.PIPE, env=variables).stdout


def sweep(out: Path, backends: str, device: str) -> None:
    """Measure the grid, and the blocks' attention."""
    one = GRIDS[device]
    common = (f"backend={backends}", f"sweep={SWEEP}", f"device={device}", "tracker=none")
    dtype = "dtype=bf16" if device == "cuda" else "dtype=fp32"
    shapes = (
        f"batch={_words(one['batch'])}", dtype, "model=sdpa_bench", f"model.q_heads={one['heads']}",
        "model.embedding=null", f"model.head_dim={_words(one['dims'])}",
    )  # fmt: skip
    lengths = _words(one["seq_len"])
    command("-m", *shapes, f"seq_len={lengths}", "causal=true,false", *common, out=out)
    command("-m", *shapes, "q_len=1", f"kv_len={lengths}", "causal=false", "passes=[forward]", *common, out=out)
    if device == "cuda":
        command("-m", "model=flux", *common, out=out)
        command("-m", "model=llama3_8b", "seq_len=4096", "causal=true", "dtype=bf16", *common, out=out)


def _words(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def drawn(draw: random.Random, device: str) -> Case:
    """A random shape between those of the grid; lengths are uniform in their logarithm."""
    one = GRIDS[device]
    first, *_, last = one["seq_len"]
    length = 8 * round(math.exp(draw.uniform(math.log(first), math.log(last))) / 8)
    most = one["batch"][-1] * one["heads"]
    batch, heads = draw.choice(
        [(b, h) for b in range(1, 5) for h in range(1, most + 1) if one["heads"] <= b * h <= most]
    )
    dim, decode = draw.choice(one["dims"]), draw.randrange(DECODE_OF) == 0
    return Case(
        batch=batch, q_heads=heads, kv_heads=heads, q_len=1 if decode else length, kv_len=length, head_dim=dim,
        value_dim=dim, dtype="bfloat16" if device == "cuda" else "float32",
        causal=not decode and draw.random() < 0.5, align="top_left",
    )  # fmt: skip


def timed(case: Case, machine: Machine, backends: dict[str, dict[str, object]]) -> dict[str, dict[str, float]]:
    """The times of both passes by backend, in microseconds: their blocks alternate, forwards first.

    A decode has no backward.
    """
    both = case.q_len > 1
    inputs = make_inputs(case, machine.device, 0, with_gradients=both)
    timer = "cpu" if machine.gpu is None else "device"
    entries = defaultdict(list)
    labels = []
    for label, config in backends.items():
        backend = load_backend(config)
        if backend.unsupported(case, machine.device) is not None:
            continue
        calls = backend.prepare(case, inputs)
        made = {"forward": calls.forward}
        with calls.scope():
            out_bhsd = calls.forward()
            if both:
                made["backward"] = calls.backward(out_bhsd)
                made["backward"]()
        labels.append(label)
        for side, call in made.items():
            entries[side].append(Entry(make_timer(timer, machine.gpu), call, calls.scope))
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for side, own in entries.items():
        for label, timing in zip(labels, sample_turns(own, ROUNDS, card=machine.card), strict=True):
            found[label][side] = summarize(timing.times_us, timing.rounds).median_us
    return found


def rows_of(case: Case, at: int, picks: attn_exp.dispatch.Dispatcher, machine: Machine) -> list[Row]:
    """The rows of one shape, in both modes; a decode is inference."""
    choices = {mode: picks._chooser.choice(case, mode) for mode in MODES if case.q_len > 1 or mode == "inference"}
    wanted = {OWN, *(choice.label for choice in choices.values())}
    for mode, choice in choices.items():
        wanted |= constants(picks.table, mode)
        times = choice.bucket.times_us if choice.bucket is not None else {}
        near = [label for label, time_us in times.items() if time_us <= FAR * min(times.values())]
        wanted |= set(near if times and at % ALL_OF else picks.table.backends)
    own = {OWN: {name: value for name, value in choice_of("backend", OWN).items() if name != "about"}}
    backends = own | picks.table.backends
    found = timed(case, machine, {label: one for label, one in backends.items() if label in wanted})
    rows = []
    for mode, choice in choices.items():
        times = {label: sum(one.values()) if mode == "training" else one["forward"] for label, one in found.items()}
        if choice.label in times:
            rows.append(Row(case, mode, choice, times))
    return rows


def constants(table: DispatchTable, mode: str) -> set[str]:
    """The backends that may be the best constant choice: those near the best one in the mean over a table's shapes."""
    several = [bucket.times_us for bucket in table.buckets if bucket.mode == mode]
    means = {
        label: statistics.geometric_mean(times[label] for times in several)
        for label in table.backends
        if several and all(label in times for times in several)
    }
    return {label for label, mean in means.items() if mean <= FAR * min(means.values())}


def kept(out: Path) -> tuple[list[Row], int]:
    """The rows of `pick_proof.csv` with what the table of `out` picks today; the same random shapes are drawn.

    Also the number of those that are left out, since the pick was not timed.
    """
    table = read_table(out / "table.json")
    chooser, draw = Chooser(table), random.Random(SEED)
    with (out / "pick_proof.csv").open() as file:
        lines = {(line["case"], line["mode"]): line for line in csv.DictReader(file)}
    rows, every = list[Row](), len(lines)
    for _ in range(MOST_SHAPES):
        case = drawn(draw, table.fingerprint["device"])
        for mode in MODES:
            line = lines.pop((case.label(), mode), {})
            times = {label: float(line[label]) for label in (OWN, *table.backends) if line.get(label)}
            if (choice := chooser.choice(case, mode)).label in times:
                rows.append(Row(case, mode, choice, times))
    return rows, every - len(rows)


def report(rows: list[Row]) -> str:
    """Whether the picks are as good as they have to be, and a table with what decides that in each mode."""
    shown, held = list[dict[str, object]](), True
    for mode in MODES:
        own = [row for row in rows if row.mode == mode]
        if not own:
            continue
        picked = statistics.geometric_mean(row.slower() for row in own)
        # A constant choice was timed in all shapes.
        names = sorted(set.intersection(*(set(row.times_us) for row in own)) - {OWN})
        means = [(statistics.geometric_mean(row.slower(name) for row in own), name) for name in names]
        constant, name = min(means, default=(1.0, "none"))
        closed = 1 - math.log(picked) / math.log(constant) if constant > GAP else None
        # A pick_proof.csv may be without the times of SDPA's own choice.
        worst = max(own, key=lambda row: row.slower() / row.slower(OWN if OWN in row.times_us else None))
        behind = worst.slower() / worst.slower(OWN) if OWN in worst.times_us else math.nan
        held &= picked <= MEAN_LIMIT and not behind > OWN_LIMIT and (closed is None or closed >= CLOSED_LIMIT)
        shown.append({
            "mode": mode, "shapes": len(own), "fastest picked": sum(row.slower() == 1 for row in own),
            "slower, geomean": f"{100 * (picked - 1):.2f} %", "best constant": f"always {name}",
            "slower": f"{100 * (constant - 1):.2f} %", "closed": "" if closed is None else f"{100 * closed:.0f} %",
            f"behind {OWN} at most": "" if math.isnan(behind) else f"{100 * (behind - 1):.2f} %",
            "there": "" if math.isnan(behind) else f"{worst.case.label()}: {worst.choice.label}",
        })  # fmt: skip
    return (
        f"{'held' if held else 'not held'}: limits are {100 * (MEAN_LIMIT - 1):.0f} % slower than the fastest in the "
        f"geometric mean, {100 * CLOSED_LIMIT:.0f} % of the best constant choice's gap closed where that is above "
        f"{100 * (GAP - 1):.0f} %, {100 * (OWN_LIMIT - 1):.0f} % behind SDPA's own choice\n\n{grid(sheet_of(shown))}"
    )


def model_duel(picks: attn_exp.dispatch.Dispatcher, machine: Machine) -> str:
    """What a duel of a model of transformers says, with the dispatcher's attention against SDPA's own choice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cpu" if machine.gpu is None else "cuda"
    batch, tokens, hidden, layers = MODELS[device]
    heads = GRIDS[device]["heads"]
    models = {}
    for implementation in (picks.register(), "sdpa"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=tokens,
            attn_implementation=implementation,
        )  # fmt: skip
        models[implementation] = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else None)
    words = torch.randint(0, 1024, (batch, tokens), device=device)
    # Events, since a model may wait for its GPU, which the timer `device` blocks.
    timer = "cpu" if machine.gpu is None else "event"

    def infer(model: LlamaForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            return model(words, use_cache=False).logits

    def train(model: LlamaForCausalLM) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(words, labels=words, use_cache=False).loss
        loss.backward()
        return loss

    said = [f"Llama of transformers, {layers} layers, batch {batch}, {tokens} tokens, heads of {hidden // heads}"]
    for mode, step in (("inference", infer), ("training", train)):
        logits = [infer(model).float() for model in models.values()]
        apart = ((logits[0] - logits[1]).norm() / logits[1].norm()).item()
        entries = [Entry(make_timer(timer, machine.gpu), partial(step, model)) for model in models.values()]
        for entry in entries:
            entry.call()
        timings = sample_turns(entries, MODEL_ROUNDS, card=machine.card)
        medians = [medians_by_round(timing.times_us, timing.rounds) for timing in timings]
        found = compare_pair(*medians, MARGIN_FLOOR)
        low, ratio, high = (1 + one for one in (found.low, found.effect, found.high))
        times = " and ".join(f"{statistics.median(one.values()):.1f}" for one in medians)
        said.append(
            f"{mode}: {' and '.join(models)} take {times} us, "
            f"{ratio:.3f} times as fast [95 % CI: {low:.3f}, {high:.3f}] in {found.rounds} rounds: {found.verdict}; "
            f"logits differ by {apart:.1e}"
        )
    return "\n".join(said)


def duels(out: Path, table: Path) -> str:
    """What duels of blocks with the dispatcher against SDPA's own choice say."""
    folder = out / "conf" / "backend"
    folder.mkdir(parents=True, exist_ok=True)
    choice = f"# backend=picked: what the table picks.\n_target_: pick_proof.Picked\nname: picked\ntable: {table}\n"
    (folder / "picked.yaml").write_text(choice)
    duel = ("duel", "--config-dir", str(out / "conf"), "a=picked", "b=auto", "stopping.budget_s=3", "tracker=none")
    return "\n\n".join(f"{name}\n{command(*duel, *words, out=out).strip()}" for name, words in BLOCKS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", default="fa3,cudnn,triton,flash,flex")
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--skip", type=int, default=0, help="begin behind so many random shapes")
    parser.add_argument("--budget-s", type=float, default=290.0, help="seconds for the random shapes")
    parser.add_argument(
        "--again", action="store_true", help="judge today's picks by the times in OUT; measures nothing"
    )
    given = parser.parse_args()
    if given.again:
        if not (given.out / "table.json").exists():
            parser.error(f"{given.out} has no table: in it, attn-exp pick {SWEEP} out=table.json")
        rows, left_out = kept(given.out)
        print(report(rows) + f"\n{left_out} rows are left out: their pick was not timed" * bool(left_out))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given.out.mkdir(parents=True, exist_ok=True)
    out, table = given.out.resolve(), given.out.resolve() / "table.json"
    if not table.exists():
        sweep(out, given.backends, device)
    described = command("pick", SWEEP, f"out={table}", out=out).strip()
    # A second call may come to another GPU of the same name, or to other versions of what is not picked.
    picks = attn_exp.dispatch.load(table, other_gpu="warn")
    machine, draw = Machine.open(device), random.Random(SEED)
    rows = []
    for _ in range(given.skip):
        drawn(draw, device)
    began, shapes = time.perf_counter(), 0
    while shapes < given.shapes and time.perf_counter() - began < given.budget_s:
        rows += rows_of(drawn(draw, device), shapes, picks, machine)
        shapes += 1
    with (out / "pick_proof.csv").open("w", newline="") as file:
        heads = ["case", "mode", "gpu_uuid", "picked", "how", "slower", OWN, *picks.table.backends]
        writer = csv.DictWriter(file, heads)
        writer.writeheader()
        for row in rows:
            said = {"case": row.case.label(), "mode": row.mode, "gpu_uuid": machine.environment.get("gpu_uuid")}
            said |= {"picked": row.choice.label, "how": row.choice.how}
            times = {label: f"{time_us:.2f}" for label, time_us in row.times_us.items()}
            writer.writerow(said | {"slower": f"{row.slower():.4f}"} | times)
    taken = f"{shapes} random shapes between those of the sweep, in {time.perf_counter() - began:.0f} s"
    paragraphs = [f"{described}\n{taken}"]
    paragraphs += [report(rows)] if rows else []
    # The shapes are what counts, and are written before the duels.
    (out / "pick_proof.txt").write_text("\n\n".join(paragraphs) + "\n")
    try:
        paragraphs.append(model_duel(picks, machine))
    except Exception as error:  # transformers may be missing, or another version
        paragraphs.append(f"no model of transformers: {type(error).__name__}: {error}")
    if device == "cuda":
        torch.cuda.empty_cache()
        paragraphs.append(duels(out, table))
    text = "\n\n".join(paragraphs)
    (out / "pick_proof.txt").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
