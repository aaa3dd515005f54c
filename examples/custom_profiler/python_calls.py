"""A custom profiler: count the Python functions that one call runs through, with the standard library's cProfile.

Run it in this folder, or with this folder on PYTHONPATH:

    python -m attn_exp --config-dir conf profiler=python_calls backend=eager device=cpu seq_len=64
"""

import cProfile
import io
import pstats

from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.profilers.base import Subject


class PythonCalls:
    """Counts the Python functions of one call of each pass, after the job was timed."""

    def __init__(self, name: str, top: int = 10) -> None:
        self.name, self.top = name, top

    def profile(self, subject: Subject) -> Profile:
        """Return a table of functions for each pass, and the number of calls as `python_calls/PASS/calls` in MLflow."""
        kernels, metrics = [], {}
        for direction, call in subject.calls.items():
            seen = cProfile.Profile()
            with subject.scope():
                seen.runcall(call)
            text = io.StringIO()
            stats = pstats.Stats(seen, stream=text).sort_stats("tottime")
            stats.print_stats(self.top)
            (subject.folder / f"{direction}.txt").write_text(text.getvalue())
            seen.dump_stats(subject.folder / f"{direction}.pstats")
            metrics[f"{direction}/calls"] = float(stats.total_calls)
            for place, (_, count, own_s, _, _) in sorted(stats.stats.items(), key=lambda one: -one[1][2])[: self.top]:
                name = pstats.func_std_string(place)
                kernels.append(ProfiledKernel(direction=direction, name=name, count=count, time_us=1e6 * own_s))
        files = [f"{direction}.{kind}" for direction in subject.calls for kind in ("txt", "pstats")]
        return Profile(status="ok", kernels=tuple(kernels), metrics=metrics, files=subject.kept(*files))
