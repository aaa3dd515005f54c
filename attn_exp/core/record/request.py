"""The request of one job, and of a duel's rivals: what the parent writes into a folder and a worker reads."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from attn_exp.core.case.case import NORMAL, Case
from attn_exp.core.errors import NOT_DECODED, RecordError, UserError, check_name
from attn_exp.core.files import read_whole
from attn_exp.core.text import flat

# Held while a file is decoded. While one thread decodes a type for the first time, another one finds msgspec 0.22's
# description of it unfinished, and the process ends by SIGSEGV. A worker reads its first request in two threads, and
# records are read by the tracker's, too.
DECODING = threading.Lock()
# The files in a folder: of a job, and of a duel.
REQUEST_NAME = "request.yaml"
DUEL_NAME = "duel.yaml"


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The options that say how a job is measured.

    Attributes:
        timer: the timer that ranks.
        also: the secondary timers.
        precision: the relative half-width of the 95 % confidence interval to reach.
        min_rounds: the least number of rounds.
        max_rounds: the largest number of rounds.
        budget_s: seconds of sampling after which no new round starts, unless the pass is unstable.
        regime: `burst`, at the GPU's highest clock, or `sustained`, under load.
        passes: `forward`, `backward`, `step`.
        seed: the seed of the inputs.
        inputs: `normal`, or a kind of hard values (attn_exp/attention/hard_values.py).
        determinism: whether the bits of results are compared after the timing.
        accumulate: whether a backward adds its gradients to those of earlier calls, as `Tensor.backward` does where
            `.grad` is kept; of `step` too.
        l2: the content of a GPU's caches before each call: `cold`, clean lines without the call's data, or `written`,
            dirty lines of other data. On a CPU it is `warm`, with the data that the previous call left.
        gold: what the first calls are compared with: `float32`, `float64`, or `eager`, the formula in the case's dtype.
    """

    timer: str
    also: tuple[str, ...]
    precision: float
    min_rounds: int
    max_rounds: int
    budget_s: float
    regime: Literal["sustained", "burst"]
    passes: tuple[str, ...]
    seed: int
    l2: str = "cold"
    inputs: str = NORMAL
    determinism: bool = False
    accumulate: bool = False
    gold: Literal["float32", "float64", "eager"] = "float32"

    @property
    def with_gradients(self) -> bool:
        """Whether a pass needs gradients, so that the forward has to save for them."""
        return self.passes != ("forward",)


@dataclass(frozen=True, kw_only=True)
class Compile:
    """How a backend's attention goes through torch.compile.

    Attributes:
        mode: `none`, or a mode of Inductor.
        fullgraph: whether a graph break is refused.
        options: more options of Inductor.
        name: what labels call it, None for the mode.
    """

    mode: str = "none"
    fullgraph: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    # Not in the text from which `attn_exp.time` names jobs, which is older.
    name: str | None = field(default=None, repr=False)


def backend_label(name: str, compile_: Compile, providers: Iterable[str | None] = ()) -> str:
    """Return a backend's name in tables: `flash`, `flex+max-autotune`, `auto (cudnn)`.

    The compile mode, or what the user named the compilation, belongs to the name because compiling makes it another
    competitor. `providers` are, for each pass, the backend whose kernels a dispatching backend ran.
    """
    label = name if compile_.mode == "none" else f"{name}+{compile_.name or compile_.mode}"
    # A backend that ran its own kernels adds nothing to its name.
    others = dict.fromkeys(provider for provider in providers if provider and provider != name)
    return f"{label} ({', '.join(others)})" if others else label


def settings(backend: Mapping[str, Any], compile_: Compile, *, caches: bool) -> dict[str, Any]:
    """Return the options of backend and compiler, and whether the compiler may read its caches, under dotted names."""
    compiler = flat({"fullgraph": compile_.fullgraph, **compile_.options}, "compile.")
    return flat(backend) | compiler | {"caches": caches}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job that the parent gives a worker, written as `request.yaml` into the job's folder.

    `caches`, which lets compilers read what earlier processes compiled, is part of a job's identity, and so is the hash
    in `source`. `profilers`, `profiler_limit_mb`, `label` and `config` are not.

    Attributes:
        source: the origin of a backend from elsewhere, as core/source.py finds it; empty for those of this package.
        profilers: the profilers to run after timing, each with `name`, `_target_` and its options.
        profiler_limit_mb: the largest file that a profiler may leave.
        config: the composed configuration.
    """

    job: str
    sweep: str
    model: str
    device: str
    case: Case
    backend: dict[str, Any]
    measuring: Measuring
    compile: Compile = field(default_factory=Compile)
    caches: bool = True
    source: dict[str, str] = field(default_factory=dict)
    gpu_uuid: str | None = None
    profilers: tuple[dict[str, Any], ...] = ()
    profiler_limit_mb: float = 256.0
    label: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def turns_key(self) -> tuple[Any, ...]:
        """Return what jobs have to share to be measured in turns: everything but who computes."""
        return self.device, self.case, self.measuring

    def __post_init__(self) -> None:
        """Raise UserError for a name that leads out of a folder."""
        check_name("job", self.job)
        check_name("sweep", self.sweep)


_Decoded = TypeVar("_Decoded")


def read_requests(folder: Path) -> list[tuple[Request, Path]]:
    """Return a folder's request, or a duel's several, each with the folder for its record.

    Raises RecordError if the file is no request. The message names it.
    """
    duel = folder / DUEL_NAME
    if duel.exists():
        requests = _decoded(duel, list[Request])
        return [(request, folder / request.job) for request in requests]
    return [(_decoded(folder / REQUEST_NAME, Request), folder)]


def _decoded(path: Path, kind: type[_Decoded]) -> _Decoded:
    try:
        with DECODING:
            return msgspec.yaml.decode(read_whole(path), type=kind)
    except (*NOT_DECODED, UserError) as error:
        raise RecordError(f"{path} is not a request: {' '.join(str(error).split())}") from error
