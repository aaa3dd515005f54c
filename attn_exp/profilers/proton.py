"""Profiler `proton`: Triton's, with the work and bytes of each pass, and samples by line of Triton kernels."""

import re
from dataclasses import replace
from typing import Any

from attn_exp.backends.package import Unavailable
from attn_exp.core.errors import first_line
from attn_exp.core.profile import Profile, ProfiledKernel
from attn_exp.core.record import write_whole
from attn_exp.profilers.apart import ProcessLost, profile_apart
from attn_exp.profilers.base import Subject
from attn_exp.profilers.figures_csv import kernels_csv
from attn_exp.profilers.hatchet import kernels_of, rates, read_tree
from attn_exp.profilers.proton_session import begin, load_proton, run_passes

# CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, as Proton words it.
_HELD = re.compile(r"cupti\w+ with error 39\b")
# Their own kernels are Triton's, and so have lines; others' come without source.
_TRITON = ("triton", "flex", "helion", "compiled")
_TREE, _TABLE = "proton.hatchet", "kernels.csv"
_LINES = "attn_exp.profilers.proton_lines.ProtonLines"


class Proton:
    """Triton's profiler over `calls` calls of each pass, cold caches before each of them.

    With `lines`, kernels that Triton compiled are sampled by line in a second process. `apart` is the default because a
    process that PyTorch's profiler has traced in holds CUPTI already, and every worker has: it names kernels that way.
    """

    def __init__(self, name: str, calls: int = 10, lines: bool = True, apart: bool = True) -> None:
        self.name, self.calls, self.lines, self.apart = name, calls, lines, apart

    def profile(self, subject: Subject) -> Profile:
        """The tree as `proton.hatchet`, which `proton-viewer` shows, `kernels.csv`, and `lines.csv` where there is one.

        Raises:
            Unavailable: no GPU, or a Triton without its profiler.
        """
        if subject.device != "cuda":
            raise Unavailable("proton sees NVIDIA GPUs alone: use profiler=torch on a CPU")
        proton = load_proton()
        if self.apart:
            own = {"_target_": f"{__name__}.Proton", "name": self.name, "calls": self.calls}
            found = profile_apart(subject, {**own, "lines": False, "apart": False})
        else:
            found = self.look(subject, proton)
        return self.with_lines(subject, found) if found.kernels and self.lines and of_triton(subject) else found

    def look(self, subject: Subject, proton: Any) -> Profile:
        """The tree and the table by a given module `triton.profiler`, in this process.

        Raises:
            Unavailable: another profiler has CUPTI in this process.
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
        said: list[str] = []
        for direction in subject.calls:
            own = kernels_of(root, direction, self.calls)
            if not own:
                said.append(f"proton saw no kernel of {direction}")
                continue
            kernels += own
            metrics[f"{direction}/kernel_time_us"] = sum(kernel.time_us or 0.0 for kernel in own)
            metrics |= {f"{direction}/{name}": value for name, value in rates(root, direction).items()}
        write_whole(subject.folder / _TABLE, kernels_csv(kernels).encode())
        return Profile(
            status="ok" if kernels else "failed",
            reason="; ".join(said) or None,
            kernels=tuple(kernels),
            metrics=metrics,
            files=subject.kept(_TREE, _TABLE),
        )

    def with_lines(self, subject: Subject, found: Profile) -> Profile:
        """The profile with the files of a process that samples, or with why there are none."""
        try:
            lines = profile_apart(subject, {"_target_": _LINES, "name": self.name, "calls": self.calls})
            said, files = lines.reason, lines.files
        except ProcessLost as error:
            said, files = str(error), ()
        said = f"no figures by line: {said}" if said else None
        return replace(
            found,
            reason="; ".join(filter(None, [found.reason, said])) or None,
            files=tuple(dict.fromkeys((*found.files, *files))),
        )


def of_triton(subject: Subject) -> bool:
    """Whether some of a job's kernels are compiled by Triton, as far as names tell."""
    return subject.backend.name in _TRITON or subject.request.compile.mode != "none"
