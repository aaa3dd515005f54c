"""The runs that measure the configurations of figures, as few as possible."""

import shlex
from collections.abc import Sequence

from attn_exp.core.case import HALVES
from attn_exp.reproduce.figures import Figure

# What every configuration has and no two choices of a group differ in: these vary inside of one run.
_VARIED = ("batch", "model.q_heads", "model.kv_heads", "model.head_dim", "model.value_dim", "seq_len", "causal",
           "window")  # fmt: skip
# What a figure's overrides leave out means the same in a run, which other figures of it may set.
_DEFAULTS = {"window": "null", "model.value_dim": "null", "model.kv_heads": "null"}


def runs(figures: Sequence[Figure], more: Sequence[str], sweep: str) -> list[list[str]]:
    """Return the arguments of `attn-exp run` that measure each configuration once, all in one sweep.

    Configurations of one backend, dtype and settings are one run, whose jobs vary in a node `figure` of its own. Each
    configuration has the passes that figures need; the backward needs its forward.

    Args:
        figures: those to measure.
        more: overrides of the user's own, for all runs.
        sweep: the sweep's name.
    """
    passes: dict[tuple[str, ...], set[str]] = {}
    for figure in figures:
        if figure.backend is not None:
            passes.setdefault(tuple(figure.words()), set()).add(figure.direction)
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for words, directions in passes.items():
        split = dict(word.split("=", 1) for word in words)
        fixed = [f"{key}={value}" for key, value in split.items() if key not in _VARIED]
        if directions <= set(HALVES):
            directions = directions if directions == {"forward"} else set(HALVES)
        fixed.append(f"passes=[{','.join(sorted(directions, key=('forward', 'backward', 'step').index))}]")
        varied = _DEFAULTS | {key: value for key, value in split.items() if key in _VARIED}
        groups.setdefault(tuple(fixed), []).append(varied)
    return [
        ["-m", *fixed, *_choices(configurations), *more, f"sweep={sweep}"] for fixed, configurations in groups.items()
    ]


def _choices(configurations: Sequence[dict[str, str]]) -> list[str]:
    """Return the overrides of which each combination is one configuration."""
    keys = [key for key in _VARIED if any(key in one for one in configurations)]
    same = [key for key in keys if len({one.get(key) for one in configurations}) == 1]
    varied = [key for key in keys if key not in same]
    shared = [f"{key}={configurations[0][key]}" for key in same]
    if len(varied) < 2:
        return shared + [f"{key}={','.join(one[key] for one in configurations)}" for key in varied]
    names = {key: key.replace(".", "_") for key in varied}
    points = ["{" + ",".join(f"{names[key]}:{one[key]}" for key in varied) + "}" for one in configurations]
    return [*shared, f"+figure={','.join(points)}", *(f"{key}=${{figure.{names[key]}}}" for key in varied)]


def command(arguments: Sequence[str]) -> str:
    """Return a run as it is typed."""
    return shlex.join(["attn-exp", "run", *arguments])
