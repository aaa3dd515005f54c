"""Profiler `torch`: a Chrome trace of some calls of each pass, and a table of what ran in them."""

from torch.autograd.profiler import record_function

from attn_exp.core.files import write_whole
from attn_exp.core.record.profile import Profile
from attn_exp.profilers.base import Subject, kernels_csv
from attn_exp.profilers.chrome import PREFIX, read_trace
from attn_exp.timers.call import synchronize
from attn_exp.timers.trace import silent_profile

TRACE_NAME = "trace.json"
_TABLE = "kernels.csv"


class TorchProfiler:
    """PyTorch's profiler over `calls` calls of each pass, on a GPU with cold caches before each."""

    def __init__(self, name: str, calls: int = 5) -> None:
        self.name, self.calls = name, calls

    def profile(self, subject: Subject) -> Profile:
        """Write the trace as `trace.json`, which Perfetto and chrome://tracing open, and `kernels.csv`."""
        path = subject.folder / TRACE_NAME
        device = subject.device
        # Not torch.profiler.profile, which imports all of Inductor: see timers/trace.py.
        session = silent_profile(use_cpu=True, use_device="cuda" if device == "cuda" else None, use_kineto=True)
        with subject.scope(), session:
            for direction, call in subject.calls.items():
                for _ in range(self.calls):
                    subject.evict_caches()
                    with record_function(f"{PREFIX}{direction}"):
                        call()
            # Wait for all launched work inside the session.
            synchronize(device)
        session.export_chrome_trace(str(path))
        passes = read_trace(path, device)
        kernels = tuple(kernel for one in passes.values() for kernel in one.kernels)
        write_whole(subject.folder / _TABLE, kernels_csv(kernels).encode())
        metrics = {
            f"{direction}/{name}": value for direction, one in passes.items() for name, value in one.metrics.items()
        }
        empty = " and ".join(side for side, one in passes.items() if device == "cuda" and not one.kernels) or None
        return Profile(
            status="failed" if device == "cuda" and not kernels else "ok",
            reason=empty and f"no kernel of {empty} in the trace: is CUPTI allowed to trace on this machine?",
            kernels=kernels,
            metrics=metrics,
            files=subject.kept(TRACE_NAME, _TABLE),
        )
