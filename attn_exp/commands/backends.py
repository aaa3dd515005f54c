"""`attn-exp backends`: what each backend is, whether it is installed, and what it can compute."""

from attn_exp.commands.options import CONFIG_DIR, Arguments, Command, Option
from attn_exp.core.values import one_of

FORMATS = ("table", "markdown")


def run(given: Arguments) -> int:
    """Print the overview, or for a case who can compute it; return the exit code."""
    from attn_exp.config.compose import compose_config, resolved_config
    from attn_exp.config.request import request_from_config
    from attn_exp.core.host.nvml import visible_gpus
    from attn_exp.execution.capabilities import ask, markdown, table, verdicts

    request, own_choices = None, given.get("config_dir")
    if given.overrides:
        config = resolved_config(compose_config(given.overrides, "backends", own_choices), given.overrides)
        request = request_from_config(config, visible_gpus())
    answers = ask(request, own_choices)
    if given.get("format") == "markdown":
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
    about=(
        "Lists each backend: what it is, whether it is installed, and what it can compute. With a case, in the keys of "
        "`attn-exp run`, it says for each backend whether it can compute that case, or why not; nothing is measured."
    ),
    examples=(
        ("attn-exp backends", "all backends"),
        ("attn-exp backends model=llama3_8b seq_len=4096 dtype=bf16 causal=true", "those that compute a case"),
    ),
    options=(
        Option(
            name="format",
            value="FORMAT",
            help="table or markdown",
            read=one_of(FORMATS),
            default="table",
            choices=FORMATS,
        ),
        CONFIG_DIR,
    ),
    overrides=(("KEY=VALUE", "the case, in the groups and keys that attn-exp run --help lists"),),
    exits=("0 the list was printed", "2 invalid command line"),
    run=run,
)
main = COMMAND.main
