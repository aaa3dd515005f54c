"""`attn-exp backends`: what each backend is, whether it is installed, and what it can compute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attn_exp.commands.options import Command
from attn_exp.core.options import Options, config_dir_option, option


@dataclass(frozen=True, kw_only=True)
class BackendsOptions(Options):
    """Lists each backend: what it is, whether it is installed, and what it can compute.

    With a case, in the keys of `attn-exp run`, it says for each backend whether it can compute that case, or why not;
    nothing is measured.
    """

    format: Literal["table", "markdown"] = option("table or markdown", "FORMAT", default="table")
    config_dir: Path | None = config_dir_option()


def run(options: BackendsOptions) -> int:
    """Print the overview, or for a case who can compute it; return the exit code."""
    from attn_exp.config.compose import compose_config, resolved_config
    from attn_exp.config.request import request_from_config
    from attn_exp.core.host.nvml import visible_gpus
    from attn_exp.execution.capabilities import ask, markdown, table, verdicts

    request = None
    if options.overrides:
        composed = compose_config(options.overrides, "backends", options.config_dir)
        config = resolved_config(composed, options.overrides)
        request = request_from_config(config, visible_gpus())
    answers = ask(request, options.config_dir)
    if options.format == "markdown":
        print(markdown(answers))
    elif request is None:
        print(table(answers))
    else:
        where = "the GPU" if request.device == "cuda" else "the CPU"
        print(f"{request.case.label()} on {where}\n\n{verdicts(answers)}")
    return 0


COMMAND = Command(
    name="backends",
    usage="[--config-dir FOLDER] [format=table|markdown] [KEY=VALUE ...]",
    options=BackendsOptions,
    run=run,
    examples=(
        ("attn-exp backends", "all backends"),
        ("attn-exp backends model=llama3_8b seq_len=4096 dtype=bf16 causal=true", "those that compute a case"),
    ),
    overrides=(("KEY=VALUE", "the case, in the groups and keys that attn-exp run --help lists"),),
    exits=("0 the list was printed", "2 invalid command line"),
)
main = COMMAND.main
