"""Profilers that find little, or hurt the process they run in; for sweeps in real worker processes."""

import ctypes
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from attn_exp.attention.inputs import Inputs
from attn_exp.backends.base import Calls
from attn_exp.backends.eager import Eager
from attn_exp.backends.package import Unavailable
from attn_exp.core.case.case import Case
from attn_exp.core.record.profile import Profile, ProfiledKernel
from attn_exp.profilers.base import Subject, profile_apart


class Works:
    """Calls each pass once and leaves a file of `megabytes`."""

    def __init__(self, name: str, megabytes: float = 0.0) -> None:
        self.name, self.megabytes = name, megabytes

    def profile(self, subject: Subject) -> Profile:
        assert (subject.job / "record.json").exists() and not list(subject.folder.iterdir())
        with subject.scope():
            for call in subject.calls.values():
                call()
        (subject.folder / "notes.txt").write_text("seen")
        (subject.folder / "trace.bin").write_bytes(bytes(int(self.megabytes * 1e6)))
        kernels = tuple(ProfiledKernel(direction=side, name="k", count=1, time_us=2.0) for side in subject.calls)
        files = subject.kept("notes.txt", "trace.bin", "absent.txt")
        return Profile(status="ok", kernels=kernels, metrics={"kernels": len(kernels)}, files=files)


class Raises(Works):
    def profile(self, subject: Subject) -> Profile:
        (subject.folder / "half.txt").write_text("half of it")
        raise RuntimeError("this profiler raises\non two lines")


class Missing(Works):
    def profile(self, subject: Subject) -> Profile:
        raise Unavailable("it is not installed: pip install it")


class Segfaults(Works):
    def profile(self, subject: Subject) -> Profile:
        ctypes.string_at(0)
        raise AssertionError


class Hangs(Works):
    def profile(self, subject: Subject) -> Profile:
        time.sleep(3600)
        raise AssertionError


class Counts(Eager):
    """The formula, which keeps count of its forwards in a file."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        self.path, self.calls = Path(path), 0

    def prepare(self, case: Case, inputs: Inputs) -> Calls:
        calls = super().prepare(case, inputs)

        def forward() -> torch.Tensor:
            self.calls += 1
            self.path.write_text(str(self.calls))
            return calls.forward()

        return replace(calls, forward=forward)


class Apart(Works):
    """Works in a process of its own, and says how many processes it has been in and how many passes it called."""

    def __init__(self, name: str, apart: bool = True) -> None:
        super().__init__(name)
        self.apart = apart

    def profile(self, subject: Subject) -> Profile:
        if self.apart:
            (subject.folder / "parent.txt").write_text(str(os.getpid()))
            own = f"{type(self).__module__}.{type(self).__name__}"
            return profile_apart(subject, {"_target_": own, "name": self.name, "apart": False})
        parent = subject.folder / "parent.txt"
        processes = {int(parent.read_text()), os.getpid()}
        parent.unlink()
        profile = super().profile(subject)
        return replace(profile, metrics={"processes": len(processes), "passes": len(profile.kernels)})


class CrashesApart(Apart):
    def profile(self, subject: Subject) -> Profile:
        if not self.apart:
            ctypes.string_at(0)
        return super().profile(subject)
