"""`attn-exp bisect`: finds the version of a package that made a case slower."""

import contextlib
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_exp.commands.options import Command
from attn_exp.config.overrides import override_key
from attn_exp.core.case.case import HALVES
from attn_exp.core.errors import UserError
from attn_exp.core.options import Options, config_dir_option, option
from attn_exp.core.values import one_of, share

if TYPE_CHECKING:
    from attn_exp.bisect.search import Answer
    from attn_exp.bisect.versions import Packages
    from attn_exp.core.record.request import Request

UNDECIDED = 1
# A round is short: it is the rounds that are compared, and they take turns.
_WAY = ("stopping.min_rounds=7", "stopping.max_rounds=9", "isolation=fresh", "tracker=none")
# Fixed work beside the case, on a backend that no package but torch changes.
_CANARIES = {
    "cpu": ("backend=eager", "dtype=fp32", "model=gpt2", "batch=1", "seq_len=128"),
    "cuda": ("backend=flash", "dtype=bf16", "model=sdpa_bench", "batch=4", "seq_len=2048"),
}


@dataclass(frozen=True, kw_only=True)
class BisectOptions(Options):
    """Searches the versions between a fast and a slow one for the first slow one, in log2(n) steps.

    Each version is installed into an environment of its own and measured in turns with the good one, round by round. It
    stops where it cannot tell. The same command again goes on where it was ended.
    """

    good: str | None = option("the fast end: NAME==VERSION", "END")
    bad: str | None = option("the slow end", "END")
    wheels: Path | None = option("take the versions from a folder of wheels", "FOLDER", shown="the index of pip")
    pass_: str = option("the pass that got slower", "PASS", default="forward", read=one_of(HALVES))
    margin: float = option("the smallest difference of the ends that counts", "PERCENT", default="1%", read=share)
    state: Path | None = option(
        "where environments and rounds are kept; a folder with rounds goes on", "FOLDER", shown="bisects/NAME"
    )
    config_dir: Path | None = config_dir_option()


def run(options: BisectOptions) -> int:
    """Search, and print the steps and the answer; return the exit code."""
    if not options.good or not options.bad:
        raise UserError("a bisection needs two ends, for example good=flash-attn-4==4.0.0b3 bad=flash-attn-4==4.0.0b36")
    if any(override_key(word) == "passes" for word in options.overrides):
        raise UserError("a bisection is about one pass: write pass=forward or pass=backward in place of passes=")
    from attn_exp.bisect.versions import packages

    versions = packages(options.good, options.bad, options.wheels.resolve() if options.wheels else None)
    return _search(options, versions, canary=versions.package.lower() != "torch")


def _search(options: BisectOptions, versions: "Packages", *, canary: bool) -> int:
    from attn_exp.bisect.measuring import SideBySide
    from attn_exp.bisect.search import search
    from attn_exp.core.host.nvml import visible_gpus
    from attn_exp.execution.gpus import leased

    gpus, direction = visible_gpus(), options.pass_
    requests = _requests(options, gpus, canary=canary)
    device = requests["case"].device
    question = {"versions": list(versions.names), "case": list(options.overrides), "pass": direction, "device": device}
    digest = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:8]
    folder = options.state or Path(f"bisects/{versions.package}-{digest}")
    side_by_side = SideBySide(versions, requests, direction, folder, question)
    count = len(versions.names)
    steps = max(1, (count - 1).bit_length())
    print(f"{count} versions, about {steps} steps; the good one beside each; kept in {folder}", flush=True)
    with leased(device, gpus, os.environ, lambda text: print(text, file=sys.stderr)), contextlib.closing(side_by_side):
        answer = search(
            count,
            side_by_side.measure,
            options.margin,
            lambda index, text: print(f"{versions.label(index)}: {text}", flush=True),
        )
    print(sentence(answer, versions), flush=True)
    return 0 if answer.kind == "found" else UNDECIDED


def _requests(options: BisectOptions, gpus: "list[Any]", *, canary: bool) -> "dict[str, Request]":
    """Return the job of the case, and that of the canary."""
    from dataclasses import replace

    from attn_exp.config.compose import compose_config, resolved_config
    from attn_exp.config.request import request_from_config

    passes = "passes=[forward]" if options.pass_ == "forward" else "passes=[forward,backward]"

    def request(words: "list[str]") -> "Request":
        config = resolved_config(compose_config(words, "bisect", options.config_dir), words)
        # A class of the user's own is another one in each version.
        return replace(request_from_config(config, gpus), source={})

    own = list(options.overrides)
    # A class without a name gets one from itself.
    named = any(re.match(r"\+*backend(\.name)?=", word) for word in own)
    case = request([*(() if named else ("~backend.name",)), *_WAY, passes, *own]) if own else request([*_WAY, passes])
    if not canary:
        return {"case": case}
    return {"case": case, "canary": request([*_CANARIES[case.device], *_WAY, passes, f"device={case.device}"])}


def sentence(answer: "Answer", versions: "Packages") -> str:
    """Return the answer as one sentence."""
    good, bad = versions.label(answer.good), versions.label(answer.bad)
    if answer.kind == "same":
        return f"there is nothing to find: {good} and {bad} differ by less than margin= ({answer.reason})"
    if answer.kind == "undecided":
        return f"undecided: a first slow one can only be after {good} and not after {bad} ({answer.reason})"
    if answer.skipped:
        between = ", ".join(versions.label(index) for index, _ in answer.skipped)
        return f"the first slow one is {bad} or one that was skipped before it: {between}; {good} is fast"
    return f"{bad} is the first slow one; {good} is fast; the bad end takes {100 * answer.effect:.1f} % more time"


COMMAND = Command(
    name="bisect",
    usage="good=NAME==VERSION bad=NAME==VERSION [wheels=FOLDER], and KEY=VALUE ...",
    options=BisectOptions,
    run=run,
    examples=(
        ("attn-exp bisect good=flash-attn-4==4.0.0b3 bad=flash-attn-4==4.0.0b36 backend=fa4", "from the index"),
        ("attn-exp bisect good=mine==1.0 bad=mine==1.9 wheels=dist backend._target_=mine.Attention", "from wheels"),
    ),
    overrides=(("KEY=VALUE", "the case and the backend, in the groups and keys that attn-exp run --help lists"),),
    exits=("0 found", "1 undecided, or nothing to find", "2 invalid command line"),
)
main = COMMAND.main
