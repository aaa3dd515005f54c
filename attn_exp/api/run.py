"""Run a sweep from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from attn_exp.api.sweep import Sweep
    from attn_exp.core.record.record import Record
    from attn_exp.results.result import Result


def run(
    *overrides: str,
    each: Callable[[Result], object] | None = None,
    config_dir: str | Path | None = None,
    **choices: Any,
) -> Sweep:
    """Run a sweep as `attn-exp run -m` does, and return it with its answer.

    Jobs are measured in a process of their own, so that a kernel that crashes ends no notebook. The same call with the
    same `sweep=` measures only what is not done yet. Progress is on standard error, a line for each finished job;
    nothing is printed on standard output. Ctrl-C (in a notebook: interrupt the kernel) ends the sweep, and keeps what
    is done.

    Args:
        *overrides: as on the command line: `"backend=flash,cudnn"`, `"hydra/launcher=local_gpus"`.
        each: called with each result as its job ends, or at once if it was done before. Its exceptions end the sweep.
        config_dir: a folder with choices of one's own (`--config-dir`).
        **choices: the same as Python objects: `batch=[1, 8]` is `batch=1,8`, a job for each. `passes=["forward"]` and
            other keys of lists are one value, as is a tuple. `stopping={"budget_s": 1}` is `stopping.budget_s=1`.
            `quiet=True` prints no progress. `docs/configuration.md` lists all keys.

    Returns:
        The sweep. It has a result for each job, also for those that failed; with `dry_run=True`, which prints the
        jobs, it has none.

    Raises:
        UserError: a choice does not exist, no job is possible, or the sweep cannot be stored; the message is the
            command's.

    Example:
        ```python
        sweep = attn_exp.run("backend=flash,math", batch=[1, 8], sweep="first")
        print(sweep.answer)
        ```
    """
    from attn_exp.api.sweep import Sweep
    from attn_exp.api.timed import overrides_of
    from attn_exp.commands.run import run_sweep
    from attn_exp.config.overrides import override_key
    from attn_exp.core.errors import UserError
    from attn_exp.results.read import read_folder
    from attn_exp.results.result import result_of

    flags = [] if config_dir is None else ["--config-dir", str(config_dir)]

    def ended(record: Record, folder: Path) -> None:
        if each is not None:
            each(result_of(record, folder / "record.json"))

    chosen = overrides_of(choices)
    twice = {override_key(override) for override in overrides} & {override_key(one) for one in chosen}
    if twice:
        raise UserError(f"{min(twice)} is given as text and as a keyword: leave one out")
    folder = run_sweep([*flags, "-m", *overrides, *chosen], ended)
    return Sweep("", "", ()) if folder is None else Sweep.of(read_folder(folder, may_be_empty=True))
