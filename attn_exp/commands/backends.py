"""python -m attn_exp.backends [--config-dir FOLDER] [format=table|markdown] [KEY=VALUE ...]

What each backend is, whether it is installed, and what it can compute. With a case, in the keys of
`python -m attn_exp`, says for each backend whether it can compute that case, or why not; nothing is measured.
Those in FOLDER/backend/ are asked too.

  python -m attn_exp.backends
  python -m attn_exp.backends model=llama3_8b seq_len=4096 dtype=bf16 causal=true
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tabulate import tabulate

from attn_exp.backends.supports import Supports
from attn_exp.config.compose import compose_config, resolved_config, split_config_dir
from attn_exp.config.request import named_backend, request_from_config, resolve_device
from attn_exp.core.case import DTYPES, Case
from attn_exp.core.conf import conf_folder
from attn_exp.core.errors import UserError, nearest
from attn_exp.run.gpus import visible_gpus
from attn_exp.run.worker_process import worker_variables

FORMATS = ("table", "markdown")
_WIDTHS = {"backend": 16, "version": 12, "about": 46, "can compute": 40}
_SHORT = {name: typed for typed, name in DTYPES.items()}


def main(arguments: list[str]) -> int:
    """Print the overview; 0, or 2 after a mistake of the user's."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        print(_overview(arguments))
    except UserError as error:
        print(f"attn_exp.backends: {error}", file=sys.stderr)
        return 2
    return 0


def _overview(arguments: Sequence[str]) -> str:
    form = "table"
    overrides = []
    words, own_choices = split_config_dir(arguments)
    for argument in words:
        key, _, value = argument.partition("=")
        if key == "format":
            form = value
        else:
            overrides.append(argument)
    if form not in FORMATS:
        raise UserError(f"format={form} is no format: {nearest(form, FORMATS)}choose one of {', '.join(FORMATS)}")
    gpus = visible_gpus()
    case: Case | None = None
    device = "auto"
    if overrides:
        config = resolved_config(compose_config(overrides, "backends", own_choices))
        request = request_from_config(config, gpus)
        case, device = request.case, str(config["device"])
    device = resolve_device(device, gpus)[0]
    answers = ask(device, case, own_choices)
    if form == "markdown":
        return markdown(answers)
    head = f"{case.label()} on {'the GPU' if device == 'cuda' else 'the CPU'}\n\n" if case else ""
    return head + (verdicts(answers) if case else table(answers))


def ask(device: str, case: Case | None, own_choices: Path | None = None) -> list[dict[str, Any]]:
    """Ask all backends of conf/backend, and those of a folder of one's own, in a process of its own.

    That one may import torch and whatever they need.

    Raises:
        UserError: a file that is no backend's, or a backend that ends the process.
    """
    configs = [configured(path) for folder in (conf_folder(), own_choices) if folder for path in _files(folder)]
    question = msgspec.json.encode({"backends": configs, "device": device, "case": case})
    ran = subprocess.run(
        [sys.executable, "-m", "attn_exp.worker.capabilities"],
        input=question,
        env=worker_variables(os.environ),
        capture_output=True,
        check=False,
        timeout=300,
    )
    if ran.returncode:
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"the backends could not be asked: {' '.join(last)}")
    answers: list[dict[str, Any]] = msgspec.json.decode(ran.stdout)
    return answers


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "backend").glob("*.yaml"))


def configured(path: Path) -> dict[str, Any]:
    """A backend's options as its file has them. Raises UserError for a file that names no class."""
    try:
        options = msgspec.yaml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path} is no backend: it needs a line _target_: package.module.Class")
    return named_backend(options)


def can_compute(supports: Supports) -> str:
    """What a backend supports in a few words."""
    words = ["/".join(_SHORT.get(name, name) for name in supports.dtypes)]
    if supports.devices == ("cuda",):
        words.append("GPU")
    if supports.head_dims is not None:
        words.append("d " + "/".join(map(str, supports.head_dims)))
    elif supports.largest_head_dim is not None:
        words.append(f"d <= {supports.largest_head_dim}")
    if supports.value_dims != "equal":
        pairs = "d_qk != d_v" if supports.value_dims == "any" else " ".join(f"{q}/{v}" for q, v in supports.value_dims)
        words.append(pairs)
    words += ["grouped heads"] if supports.grouped else []
    words += ["q != kv " + " or ".join(name.replace("_", "-") for name in supports.align)] if supports.align else []
    words += [name for name in ("window", "softcap", "packed") if getattr(supports, name)]
    words += ["forward only"] if supports.passes == ("forward",) else []
    words += [f"{_SHORT.get(name, name)} forward only" for name in supports.forward_only]
    if supports.capability or supports.capabilities:
        words.append(f"sm >= {'.'.join(map(str, supports.capability))}" if supports.capability else "")
        words.append(f"sm {'/'.join(f'{major}x' for major in supports.capabilities)}" if supports.capabilities else "")
    return ", ".join(filter(None, words))


def _supports(answer: dict[str, Any]) -> str:
    return can_compute(msgspec.convert(answer["supports"], Supports)) if answer["supports"] else ""


def table(answers: Sequence[dict[str, Any]]) -> str:
    """All backends for a terminal of 120 columns: version or why there is none, what it is, what it can compute."""
    rows = [[one["name"], one["version"] or "-", one["about"], _supports(one)] for one in answers]
    text = tabulate(rows, list(_WIDTHS), tablefmt="simple", maxcolwidths=list(_WIDTHS.values()))
    missing = [f"{one['name']}: {one['missing']}" for one in answers if one["missing"]]
    return "\n".join([text, "", *(["not available here:", *missing] if missing else ["all are available here"])])


def verdicts(answers: Sequence[dict[str, Any]]) -> str:
    """For each backend whether it can compute the case, or why not."""
    rows = []
    for one in answers:
        why = one["missing"] or one["refusal"]
        rows.append([one["name"], "no" if why else "yes", why or ""])
    return tabulate(rows, ["backend", "can", "why not"], maxcolwidths=[16, 4, 92])


def markdown(answers: Sequence[dict[str, Any]]) -> str:
    """The table of docs/backends.md: what does not depend on the machine."""
    rows = [
        [f"`{one['name']}`", one["about"], _supports(one), f"`{one['needs']}`" * bool(one["needs"])] for one in answers
    ]
    return tabulate(rows, ["backend", "what it is", "can compute", "needs"], tablefmt="pipe")
