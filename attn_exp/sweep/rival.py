"""The objective of a search by duels (`rival=`): each job is measured side by side with one and the same rival."""

import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from attn_exp.compare.ratio import geometric_mean
from attn_exp.config.compose import is_dry_run, new_sweep_name, prepare_hydra
from attn_exp.config.overrides import hydra_aside, override_key
from attn_exp.core.errors import UserError
from attn_exp.core.stats.paired import PairedComparison
from attn_exp.run.duel import run_duel

# Settings that a job has of its own; everything else is also its rival's.
_OWN = ("backend", "compile")
# Settings of where a search goes, not of what is measured.
_SEARCH = ("rival", "sweep", "folder")


class Duels:
    """Measures jobs against a rival, a duel each in a folder of its own inside of the search's."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, ...], float] = {}

    def ratio(self, config: DictConfig, quiet: bool) -> float:
        """Return a job's time divided by its rival's: the geometric mean over the passes, which a search minimises.

        A job that was measured before is not measured again, and one that cannot be measured is infinitely slow.

        Args:
            config: the job's configuration, as Hydra composed it; its overrides are Hydra's of this moment.
            quiet: whether the duel's report goes to standard error.

        Raises:
            UserError: the rival or another choice does not exist.
        """
        task = HydraConfig.get().overrides.task
        overrides = tuple(sorted((one for one in task if not _is(one, _SEARCH)), key=override_key))
        if overrides not in self._ratios or is_dry_run(config):
            self._ratios[overrides] = self._measure(config, overrides, quiet)
        own = " ".join(override for override in overrides if _is(override, _OWN)) or "the default"
        value, best = self._ratios[overrides], min(self._ratios.values())
        if not is_dry_run(config) and config.quiet is not True:
            print(f"{own}: {_shown(value)} of {config.rival}'s time, best so far {_shown(best)}", file=sys.stderr)
        return value

    def _measure(self, config: DictConfig, overrides: Sequence[str], quiet: bool) -> float:
        own = [override for override in overrides if _is(override, _OWN)]
        shared = [override for override in overrides if not _is(override, _OWN)]
        sweep, folder = str(config.sweep), str(config.folder).replace("'", "\\'")
        own_choices = _own_choices()
        flags = [] if own_choices is None else ["--config-dir", str(own_choices)]
        words = [f"a={config.rival}", *map(_as_typed, own), *shared, *flags]
        with contextlib.ExitStack() as stack:
            if quiet:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            # Composing the rivals names a sweep of their own; Hydra reads the search's name again at its end.
            stack.callback(prepare_hydra, sweep)
            stack.enter_context(hydra_aside())
            name = new_sweep_name("duel-")
            verdicts = run_duel(
                {"a": [f"backend={config.rival}"], "b": own},
                [*shared, f"sweep={name}", f"folder='{folder}/{name}'"],
                own_choices,
                words,
            )
        return mean_ratio(verdicts) if verdicts else math.inf


def mean_ratio(verdicts: dict[str, list[PairedComparison]]) -> float:
    """Return the geometric mean over the passes of the second rival's time divided by the first one's."""
    logs = [math.log1p(comparison.effect) for comparisons in verdicts.values() for comparison in comparisons]
    return geometric_mean(logs)


def check_rival(config: DictConfig, *, searches: bool) -> bool:
    """Return whether jobs are measured against a rival. Raises UserError where nothing is searched for."""
    if config.get("rival") is None:
        return False
    if not searches:
        raise UserError(
            f"rival={config.rival} is the objective of a search: add -m hydra/sweeper=optuna, or measure one duel with "
            f"attn-exp duel a={config.rival} b=..."
        )
    return True


def _shown(ratio: float) -> str:
    return f"{ratio:.4g}" if math.isfinite(ratio) else "unknown share"


def _as_typed(override: str) -> str:
    """Return an override of the second rival as `attn-exp duel` takes it: `b.rows=8` for `backend.rows=8`."""
    word = override.lstrip("+")
    return f"b{word.removeprefix('backend')}" if word.startswith("backend") else f"b.{word}"


def _is(override: str, keys: Sequence[str]) -> bool:
    return override_key(override).partition(".")[0] in keys


def _own_choices() -> Path | None:
    """Return the folder that `--config-dir` names."""
    sources = HydraConfig.get().runtime.config_sources
    return next((Path(source.path) for source in sources if source.provider == "command-line"), None)
