"""What `dry_run=true` prints: a line for each job, and what they come to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from attn_exp.core.errors import UserError
from attn_exp.core.prediction import Prediction
from attn_exp.core.request import Request
from attn_exp.core.text import duration
from attn_exp.results.store import done_record
from attn_exp.run.forecast import Forecast, forecasts, memory_text
from attn_exp.run.predicted import predicted_text, predictions
from attn_exp.run.session import Session

# How they are counted, in this order; the first three always.
_COUNTED = {
    "would run": "would run",
    "done": "are done",
    "impossible": "are impossible",
    "unsupported": "are unsupported",
    "unavailable": "are unavailable",
    "too large": "are too large",
}
_ALWAYS = 3


@dataclass(frozen=True)
class Planned:
    """A job of a dry run: what happens to it, its request or why there is none, and the folder of its sweeps."""

    what: str
    request: Request | None = None
    why: str = ""
    home: Path | None = None


def planned(session: Session, config: DictConfig) -> Planned:
    """Return whether a job would run, is done, or is impossible, without asking its backend."""
    try:
        request = session.request(config)
    except UserError as error:
        return Planned("impossible", why=str(error))
    folder = Path(str(config.folder)).resolve()
    done = done_record(request, folder / request.job)
    return Planned(f"done ({done.status})" if done else "would run", request, home=folder.parent)


def print_plan(session: Session, plans: Sequence[Planned], *, of_sweep: bool = False) -> None:
    """Ask the backends of jobs that would run, and print a line for each job; of a sweep also what they come to."""
    session.progress.doing("asking the backends")
    waiting = list({one.request.job: one.request for one in plans if one.what == "would run" and one.request}.values())
    unknown, found = "", dict[str, Forecast]()
    try:
        found = dict(zip([one.job for one in waiting], forecasts(waiting, session.gpus), strict=True))
    except UserError as error:
        unknown = f"what the backends would say is unknown: {error}"
    times = dict[str, dict[str, Prediction]]()
    for home in {one.home for one in plans if one.home is not None}:
        times |= predictions([one for one in waiting if found.get(one.job)], home, session.gpus)
    session.progress.end()
    lines = [_line(one, found, times) for one in plans]
    print("\n".join(f"{what:<18} {text}" for what, text in lines))
    if unknown:
        print(unknown)
    if of_sweep:
        counts = Counter("done" if what.startswith("done") else what for what, _ in lines)
        kinds = [kind for index, kind in enumerate(_COUNTED) if index < _ALWAYS or counts[kind]]
        jobs = f"{len(plans)} job{'s' * (len(plans) != 1)}"
        print(f"{jobs}: {', '.join(f'{counts[kind]} {_COUNTED[kind]}' for kind in kinds)}")
        running = [one for one in found.values() if one.what == "would run" and one.bytes]
        if len(running) > 1:
            print(_together(running))


def _line(one: Planned, found: dict[str, Forecast], times: dict[str, dict[str, Prediction]]) -> tuple[str, str]:
    if one.request is None:
        return one.what, one.why
    request = one.request
    forecast = found.get(request.job) if one.what == "would run" else None
    where = f"{request.label}  on {request.device} by timer {request.measuring.timer}"
    if forecast is None:
        return one.what, f"{where}, folder {request.job}"
    if forecast.why:
        return forecast.what, f"{request.label}  on {request.device}: {forecast.why}"
    predicted = predicted_text(times.get(request.job, {}))
    return forecast.what, ", ".join(filter(None, [where, forecast.size(), predicted, f"folder {request.job}"]))


def _together(running: Sequence[Forecast]) -> str:
    known = [one.seconds for one in running if one.seconds is not None]
    took = f"about {duration(max(1.0, sum(known)))} in all; " if len(known) == len(running) else ""
    return f"{took}the largest needs {memory_text(max(one.bytes for one in running))} or more"
