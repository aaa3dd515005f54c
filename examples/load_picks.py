"""What `attn-exp pick SWEEP target=json` has picked for a shape, with Python's standard library only.

    python examples/load_picks.py picks.json batch=32 q_len=1 kv_len=8192 page_size=16

It prints the pick of the nearest measured cell that agrees in all but batch and lengths. Fields that are not given may
have any value.
"""

import json
import math
import sys

NEAR = ("batch", "q_len", "kv_len")


def cells(path: str) -> list[dict]:
    """The cells of a file that this loader knows how to read."""
    with open(path, encoding="utf-8") as file:
        picks = json.load(file)
    if (picks.get("schema"), picks.get("version")) != ("attn_exp.picks", 1):
        raise SystemExit(f"{path} is no version 1 of attn_exp.picks")
    return picks["cells"]


def nearest(found: list[dict], mode: str = "inference", **shape: object) -> dict | None:
    """The measured cell that is nearest in octaves of batch and lengths, None if none is of this kind."""
    alike = [
        one for one in found
        if one["mode"] == mode and all(one["case"].get(name) == shape[name] for name in shape if name not in NEAR)
    ]  # fmt: skip
    sizes = {name: float(shape[name]) for name in NEAR if name in shape}
    return min(
        alike,
        key=lambda one: sum(math.log2(one["case"][name] / size) ** 2 for name, size in sizes.items()),
        default=None,
    )


def value(text: str) -> object:
    """A word as JSON has it: `32`, `true`, `null`, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    cell = nearest(cells(sys.argv[1]), **{name: value(text) for name, text in words.items()})
    if cell is None:
        raise SystemExit("no measured cell is of this kind")
    lead = cell["margin"] and f", {cell['margin']['times']:.2f} x as fast as {cell['margin']['over']}"
    print(f"{cell['pick']}{lead or ''}: measured at {[cell['case'][name] for name in NEAR]}")
