"""python bench/whole_dit.py SWEEP_FOLDER: FLUX.1's whole transformer from a sweep of its blocks.

The sweep is `python -m attn_exp -m +experiment=flux_blocks`. For each backend and pass this prints the FLOPs and the
latency of 19 double-stream and 38 single-stream blocks, one after the other, and which share of both is attention. The
attention's time is that of the backend by itself, on tensors of its own.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from attn_exp.core.case.case import PASSES
from attn_exp.core.case.flops import flops
from attn_exp.core.errors import UserError
from attn_exp.core.sheet.render import grid
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.results.read import read_folder
from attn_exp.results.result import Result, by_options

# As in src/flux/util.py of black-forest-labs/flux: depth and depth_single_blocks.
BLOCKS = {"dit_double_block": 19, "dit_block": 38}


def whole(blocks: Mapping[str, Result], attention: Result | None, direction: str) -> dict[str, str]:
    """Return what one backend makes of the whole transformer in one pass, as a row of a table.

    Args:
        blocks: the results of both blocks by workload.
        attention: that of the attention by itself, None if it was not measured.
        direction: the pass.
    """
    us = {name: blocks[name].metrics[f"{direction}/time_us"] for name in BLOCKS}
    halves = {name: blocks[name].metrics[f"{direction}/time_half_width"] for name in BLOCKS}
    total_us = sum(count * us[name] for name, count in BLOCKS.items())
    # As if both were off in the same direction: the blocks were measured one after the other on one GPU.
    half = sum(count * us[name] * halves[name] for name, count in BLOCKS.items()) / total_us
    total = sum(count * blocks[name].metrics[f"{direction}/flops"] for name, count in BLOCKS.items())
    calls = sum(BLOCKS.values())
    of_attention = calls * flops(blocks["dit_block"].case, direction)
    row = {
        "backend": blocks["dit_block"].label,
        "pass": direction,
        "TFLOP": f"{total / 1e12:.4g}",
        "ms": f"{total_us / 1e3:.4g}",
        "+-%": f"{100 * half:.1f}" if math.isfinite(half) else "",
        "TFLOPS": f"{total / total_us / 1e6:.4g}",
        "attention, % of FLOP": f"{100 * of_attention / total:.1f}",
    }
    alone_us = None if attention is None else attention.metrics.get(f"{direction}/time_us")
    row["attention, % of ms"] = "" if alone_us is None else f"{100 * calls * alone_us / total_us:.1f}"
    return row


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return a row for each backend and pass of which both blocks were measured.

    Raises:
        UserError: there is no such backend.
    """
    measured = [one for one in by_options(results) if one.status == "ok"]
    found = []
    for block in (one for one in measured if one.case.workload == "dit_block"):
        other = replace(block.case, workload="dit_double_block")
        # A backend that chooses for itself may choose another implementation in each.
        alike = [one for one in measured if one.key[1:] == block.key[1:] and one.measuring == block.measuring]
        double = next((one for one in alike if one.case == other), None)
        plain = replace(block.case, workload=None, mlp_dim=None)
        attention = next((one for one in alike if one.case == plain), None)
        if double is not None:
            blocks = {"dit_block": block, "dit_double_block": double}
            passes = [name for name in PASSES if name in block.measuring.passes]
            found += [whole(blocks, attention, direction) for direction in passes]
    if not found:
        raise UserError("no backend has both blocks: python -m attn_exp -m +experiment=flux_blocks measures them")
    return found


def main(folder: str) -> str:
    """Return the table of a sweep's folder, and the machine above it."""
    results = read_folder(Path(folder)).results
    made = rows(results)
    machines = ", ".join(sorted({one.device_name for one in results if one.device_name}))
    counted = " + ".join(f"{count} {name}" for name, count in BLOCKS.items())
    return f"{machines}: {counted}\n\n{grid(sheet_of(made))}"


if __name__ == "__main__":
    try:
        print(main(*sys.argv[1:2] or ["multirun/flux_blocks"]))
    except UserError as error:
        sys.exit(f"whole_dit.py: {error}")
