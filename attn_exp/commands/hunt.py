"""`attn-exp hunt`: searches for a case that a backend computes wrongly."""

import os
import re
import secrets
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_exp.commands.options import Command
from attn_exp.config.overrides import override_key
from attn_exp.core.errors import UserError, nearest
from attn_exp.core.options import Options, config_dir_option, device_option, option

_BUDGET = re.compile(r"(\d+\.?\d*)\s*(s|m|h|)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 24 * 3600.0


def _seconds(key: str, value: str) -> float:
    """Return a duration in seconds: 60 for `60`, `60s` or `1m`. Raises UserError for anything else."""
    match = _BUDGET.fullmatch(value)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1 <= seconds <= _LONGEST_S:
        raise UserError(f"{key}={value} is no time from 1 s to 24 h: use {key}=60s, {key}=5m")
    return seconds


def _seed(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) >= 1 << 63:
        raise UserError(f"{key}={value} is not a whole number from 0 to 2^63 - 1")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class HuntOptions(Options):
    """Searches for a case that a backend computes wrongly.

    It goes over shapes, masks, data types, layouts and values, with Hypothesis. Each result is compared with the
    float32 reference as a job's is. Prints the smallest case that fails. Needs pip install 'attn_exp[hunt]'.
    """

    backend: tuple[str, ...] = option(
        "a backend, or several with commas between them, one after the other", "BACKEND", default=()
    )
    where: str | None = option(
        'search only there, in the language of compare: where="q_len in (1, 128) and not causal"; the fields are those '
        "of a case, and inputs, backward, packed, large",
        "EXPRESSION",
    )
    budget: float = option(
        "how long each search may take: 60s, 5m; a bug is made smaller in what is left of it",
        "TIME", default="60s", read=_seconds,
    )  # fmt: skip
    device: str = device_option()
    seed: int | None = option("where the search begins", "N", shown="a new one, which is printed", read=_seed)
    config_dir: Path | None = config_dir_option()


def run(options: HuntOptions) -> int:
    """Search each backend; return 1 if a bug was found."""
    if find_spec("hypothesis") is None:
        raise UserError("a hunt needs Hypothesis: pip install 'attn_exp[hunt]'")
    from attn_exp.config.request import resolve_device
    from attn_exp.core.host.nvml import visible_gpus
    from attn_exp.execution.gpus import leased
    from attn_exp.execution.worker_process import worker_variables

    backends = _backends(options)
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    device, gpus = resolve_device(options.device, visible_gpus())
    environment = worker_variables(os.environ)
    with leased(device, gpus, environment, lambda text: print(text, file=sys.stderr)):
        found = [_hunt(options, backend, device, seed, environment) for backend in backends]
    return 1 if any(found) else 0


def _backends(options: HuntOptions) -> list[dict[str, Any]]:
    """Return the options of each backend.

    Raises UserError if there is none, it does not exist, or another key was given.
    """
    for word in options.overrides:
        key = override_key(word)
        if not key.startswith("backend."):
            near = nearest(key, COMMAND.named, cutoff=0.75)
            raise UserError(
                f"hunt has no option '{key}=': {near}a condition on the case is written as where=, for example "
                'where="head_dim=128 and causal"'
            )
    if not options.backend and not any(override_key(word) == "backend._target_" for word in options.overrides):
        raise UserError("no backend was given: write backend=flash, or backend._target_=my.module.Class")
    from attn_exp.config.compose import compose_config, resolved_config
    from attn_exp.config.request import request_from_config

    configs = []
    for name in options.backend or ("auto",):
        overrides = [f"backend={name}"] if options.backend else ["~backend.name"]
        words = [f"++{word.lstrip('+')}" if not word.startswith("~") else word for word in options.overrides]
        composed = compose_config([*overrides, *words, "device=cpu"], "hunt", options.config_dir)
        config = resolved_config(composed, words)
        configs.append(request_from_config(config, []).backend)
    return configs


def _hunt(options: HuntOptions, backend: dict[str, Any], device: str, seed: int, environment: dict[str, str]) -> bool:
    """Search one backend and print what was found; return whether something was."""
    from attn_exp.hunt.example import Question
    from attn_exp.hunt.report import lines_of, search
    from attn_exp.results.duel_command import case_words

    question = Question(backend=backend, device=device, where=options.where, budget_s=options.budget, seed=seed)
    state = search(question, environment)
    words = [] if state.example is None else case_words(state.example.case, "")
    print("\n".join(lines_of(question, state, words)), flush=True)
    return state.example is not None


COMMAND = Command(
    name="hunt",
    usage="backend=BACKEND [backend.OPTION=VALUE ...] [where=EXPRESSION] [budget=60s] [seed=N]",
    options=HuntOptions,
    run=run,
    examples=(
        ("attn-exp hunt backend=flash", "a minute, everything that the backend supports"),
        ('attn-exp hunt backend=flex where="head_dim=128 and causal and dtype=bf16" budget=5m', "a part of it"),
        ("attn-exp hunt backend._target_=my.module.Class", "a class of your own"),
    ),
    overrides=(("backend.OPTION=VALUE", "an option of the backend, or its class: backend._target_=my.module.Class"),),
    exits=("0 nothing was found", "1 a bug was found", "2 invalid command line"),
)
main = COMMAND.main
