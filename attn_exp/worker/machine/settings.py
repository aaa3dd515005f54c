"""PyTorch's settings of a whole process: a backend may set them for itself, not for the judge or another job."""

import contextlib
import ctypes
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(owner: Any, name: str) -> _Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _precision(owner: Any) -> _Setting:
    """Products of float32 matrices; `none`, which PyTorch starts with, is `ieee` once it was set and set back."""
    return (
        lambda: "ieee" if owner.fp32_precision == "none" else owner.fp32_precision,
        lambda value: setattr(owner, "fp32_precision", value),
    )


def _autocast(device: str) -> _Setting:
    return lambda: torch.is_autocast_enabled(device), lambda wanted: torch.set_autocast_enabled(device, wanted)


_SETTINGS: dict[str, _Setting] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "flash_sdp": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "mem_efficient_sdp": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math_sdp": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cudnn_sdp": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    # Set by `torch.set_float32_matmul_precision`, by `allow_tf32`, or one by one.
    "cuda_matmul_precision": _precision(torch.backends.cuda.matmul),
    "cpu_matmul_precision": _precision(torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
    "bf16_reduction": _attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "fp16_reduction": _attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "cudnn": _attribute(torch.backends.cudnn, "enabled"),
    "cudnn_benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "mkldnn": _attribute(torch.backends.mkldnn, "enabled"),
    "autocast_cpu": _autocast("cpu"),
    "autocast_cuda": _autocast("cuda"),
    # PyTorch sets it and does not say it: half of the smallest normal number is no zero otherwise.
    "flush_denormal": (lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
    "gc": (gc.isenabled, lambda wanted: gc.enable() if wanted else gc.disable()),
}


# CU_LIMIT_PERSISTING_L2_CACHE_SIZE (cuda.h).
_PERSISTING_L2 = 6


def reset_persisting_l2() -> None:
    """Make all lines of the GPU's L2 cache normal ones if a backend let some persist: others would have less of it.

    The limit becomes 0 as well (CUDA driver API, cuCtxResetPersistingL2Cache; nvbench#458, llm.c#851).
    """
    if not torch.cuda.is_initialized():
        return
    driver, limit = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    if driver.cuCtxGetLimit(ctypes.byref(limit), _PERSISTING_L2) == 0 and limit.value:
        driver.cuCtxResetPersistingL2Cache()
        driver.cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(0))


@dataclass(frozen=True)
class Settings:
    """The settings as they were."""

    values: dict[str, Any]

    @classmethod
    def now(cls) -> "Settings":
        """Return the present settings."""
        return cls({name: get() for name, (get, _) in _SETTINGS.items()})

    def changed(self) -> dict[str, str]:
        """Return those that are others now, with their present values."""
        return {name: str(value) for name, value in Settings.now().values.items() if value != self.values[name]}

    def restore(self) -> None:
        """Set what was changed back."""
        for name in self.changed():
            with warnings.catch_warnings():
                # PyTorch warns of settings that it will drop.
                warnings.simplefilter("ignore")
                _SETTINGS[name][1](self.values[name])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Have these settings inside, for a reference that must not depend on what a backend set."""
        present = Settings.now()
        self.restore()
        try:
            yield
        finally:
            present.restore()


class OwnState:
    """A rival's settings of PyTorch, which start as those that the process had before any backend was loaded."""

    def __init__(self, settings: Settings) -> None:
        self._shared, self._own = settings, settings
        self._is_inside = False
        self.set_back: set[str] = set()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Have the rival's settings inside, as it left them, and afterwards those that the process started with.

        Names of settings that had to be set back are added to `set_back`. Inside of itself this does nothing.
        """
        if self._is_inside:
            yield
            return
        self._is_inside = True
        reset_persisting_l2()
        self._own.restore()
        try:
            yield
        finally:
            self._is_inside = False
            self._own = Settings.now()
            self.set_back |= set(self._shared.changed())
            self._shared.restore()
