"""Profiler `proton`: Triton's profiler, with the work and bytes of each pass, and samples by line of Triton kernels."""

import re
from dataclasses import replace
from typing import Any

from attn_exp.backends.package import Unavailable
from attn_exp.core.errors import first_line
from attn_exp.core.files import write_whole
from attn_exp.core.profile import Profile, ProfiledKernel
from attn_exp.profilers.apart import ProcessLost, profile_apart
from attn_exp.profilers.base import Subject
from attn_exp.profilers.figures_csv import kernels_csv
from attn_exp.profilers.hatchet import kernels_of, rates, read_tree
from attn_exp.profilers.proton_session import begin, load_proton, run_passes

# Proton's message for CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED.
_HELD = re.compile(r"cupti\w+ with error 39\b")
_TREE, _TABLE = "proton.hatchet", "kernels.csv"
_LINES = "attn_exp.profilers.proton_lines.ProtonLines"


class Proton:
    """Triton's profiler over `calls` calls of each pass, with cold caches before each.

    With `lines`, a second process samples Triton kernels by line. `apart` is the default because PyTorch's profiler
    keeps CUPTI in a process in which it has traced, and every worker has: that is how it names kernels.
    """

    def __init__(self, name: str, calls: int = 10, lines: bool = True, apart: bool = True) -> None:
        self.name, self.calls, self.lines, self.apart = name, calls, lines, apart

    def profile(self, subject: Subject) -> Profile:
        """Write the tree as `proton.hatchet`, which `proton-viewer` shows, `kernels.csv`, and possibly `lines.csv`.

        Raises:
            Unavailable: there is no GPU, or Triton lacks its profiler.
        """
        if subject.device != "cuda":
            raise Unavailable("proton needs an NVIDIA GPU: use profiler=torch on a CPU")
        proton = load_proton()
        if self.apart:
            own = {"_target_": f"{__name__}.Proton", "name": self.name, "calls": self.calls}
            profile = profile_apart(subject, {**own, "lines": False, "apart": False})
        else:
            profile = self.look(subject, proton)
        return self.with_lines(subject, profile) if profile.kernels and self.lines and of_triton(subject) else profile

    def look(self, subject: Subject, proton: Any) -> Profile:
        """Profile in this process with the module `triton.profiler`.

        Raises:
            Unavailable: another profiler holds CUPTI in this process.
        """
        try:
            session = begin(proton, subject.folder / _TREE)
            try:
                run_passes(proton, subject, self.calls)
            finally:
                proton.finalize(session)
        except RuntimeError as error:
            if _HELD.search(str(error)):
                raise Unavailable(
                    f"another profiler holds CUPTI in this process, which serves one at a time ({first_line(error)}): "
                    f"set profiler.{self.name}.apart=true"
                ) from error
            raise
        root = read_tree(subject.folder / _TREE)
        kernels: list[ProfiledKernel] = []
        metrics: dict[str, float] = {}
        reasons: list[str] = []
        for direction in subject.calls:
            own = kernels_of(root, direction, self.calls)
            if not own:
                reasons.append(f"proton saw no kernel of {direction}")
                continue
            kernels += own
            metrics[f"{direction}/kernel_time_us"] = sum(kernel.time_us or 0.0 for kernel in own)
            metrics |= {f"{direction}/{name}": value for name, value in rates(root, direction).items()}
        write_whole(subject.folder / _TABLE, kernels_csv(kernels).encode())
        return Profile(
            status="ok" if kernels else "failed",
            reason="; ".join(reasons) or None,
            kernels=tuple(kernels),
            metrics=metrics,
            files=subject.kept(_TREE, _TABLE),
        )

    def with_lines(self, subject: Subject, profile: Profile) -> Profile:
        """Return the profile with the sampling process's files, or with the reason why there are none."""
        try:
            lines = profile_apart(subject, {"_target_": _LINES, "name": self.name, "calls": self.calls})
            reason, files = lines.reason, lines.files
        except ProcessLost as error:
            reason, files = str(error), ()
        reason = f"no figures by line: {reason}" if reason else None
        return replace(
            profile,
            reason="; ".join(filter(None, [profile.reason, reason])) or None,
            files=tuple(dict.fromkeys((*profile.files, *files))),
        )


def of_triton(subject: Subject) -> bool:
    """Whether Triton compiles some of the job's kernels: the backend declares it, or Inductor generates them."""
    return getattr(subject.backend, "generates_triton", False) or subject.request.compile.mode != "none"
