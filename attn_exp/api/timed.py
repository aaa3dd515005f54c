"""Steps of `attn_exp.time`: a request for a function and tensors that were given, and its result."""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from attn_exp.config.compose import compose_config, resolved_config
from attn_exp.config.overrides import hydra_aside
from attn_exp.config.request import request_from_config
from attn_exp.core.case.case import DTYPE_BYTES, E4M3, GIVEN, INT8, TYPED_DTYPES, Case
from attn_exp.core.errors import UserError, check_name, first_line
from attn_exp.core.host.nvml import visible_gpus
from attn_exp.core.record.file import FILE_NAME, write_record
from attn_exp.core.record.record import Record
from attn_exp.core.record.request import Request
from attn_exp.core.sheet.sheet import sheet_of
from attn_exp.core.sheet.web import html_table
from attn_exp.core.text import figures, half_text
from attn_exp.results.result import Result, result_of
from attn_exp.results.table import job_line

if TYPE_CHECKING:
    import torch

# Keys that say how to measure; the tensors say the rest.
CHOICES = ("stopping", "timer", "l2", "regime", "seed", "compile", "determinism")
_NAMES = ("q", "k", "v")
# Keys whose value is a list. For all others a list is several choices.
_LISTS = ("passes", "lengths", "kv_lengths", "columns", "stop_on", "timer.also", "isolation.variables", "profiler")
_SHORT = {f"torch.{name}": short for name, short in TYPED_DTYPES.items()}


@dataclass(frozen=True, repr=False)
class Timed:
    """Findings of `attn_exp.time`.

    Attributes:
        record: everything that was measured, samples included.
        result: the same without samples, as those of a sweep.
    """

    record: Record
    result: Result

    @property
    def status(self) -> str:
        """`ok`, `inaccurate`, `error` or another of `docs/running_sweeps.md`."""
        return self.record.status

    @property
    def reason(self) -> str | None:
        """Why the status is not `ok`, in one sentence; None if it is."""
        return self.record.reason

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics by pass and name, such as `forward/tflops`; empty unless the status is `ok`."""
        return self.record.metrics

    def time_us(self, direction: str = "forward") -> float:
        """Return the median time of a call in microseconds.

        Args:
            direction: the pass, `forward`, `backward` or `step`.

        Raises:
            UserError: the status is not `ok`, or the pass was not measured.
        """
        if self.status != "ok":
            raise UserError(f"{self.result.label} has no time, it is {self.status}: {self.reason}")
        if direction not in self.record.passes:
            raise UserError(f"{direction} was not measured: add it with passes=[{direction!r}]")
        return self.record.metrics[f"{direction}/time_us"]

    def __repr__(self) -> str:
        return f"<{' '.join(job_line(self.result).split())}>"

    def _repr_html_(self) -> str:
        rows = [
            {"pass": direction, "us": figures(self.metrics[f"{direction}/time_us"], half), "+-%": half_text(half)}
            for direction in (self.record.passes if self.status == "ok" else ())
            for half in (self.metrics.get(f"{direction}/time_half_width"),)
        ]
        return html_table(repr(self), sheet_of(rows))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `attn_exp.time` and the asserts are asked alike; `attn_exp.time` explains it."""

    causal: bool
    align: str | None
    scale: float | None
    reference: "Callable[..., torch.Tensor] | None"
    passes: Sequence[str] | None
    choices: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raise UserError if it is said in two ways what is right."""
        if self.reference is not None and (self.causal or self.scale is not None):
            raise UserError("reference= says what is right: leave causal= and scale= out")

    def unless(self, **choices: Any) -> "Asked":
        """Return the same with these choices where there are none."""
        return replace(self, choices={**choices, **self.choices})


def measured(
    function: "Callable[..., torch.Tensor]",
    tensors: "tuple[torch.Tensor, ...]",
    asked: Asked,
    *,
    name: str | None,
    sweep: str | None,
    folder: str | Path,
) -> Timed:
    """Judge and time a function of q, k and v; see `attn_exp.time`."""
    request = request_of(function, case_of(tensors, asked), tensors, asked, name=name, sweep=sweep or "time")
    (record,) = measured_alike([request], [function], tensors, asked)
    if sweep is None:
        return Timed(record, result_of(record))
    place = Path(folder) / sweep / request.job
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_record(record, place)
    except OSError as error:
        raise UserError(f"cannot write {place} ({error.strerror}): choose another folder=") from error
    return Timed(record, result_of(record, place / FILE_NAME))


def request_of(
    function: "Callable[..., torch.Tensor]",
    case: Case,
    tensors: "tuple[torch.Tensor, ...]",
    asked: Asked,
    *,
    name: str | None,
    sweep: str,
) -> Request:
    """Return the job of a function, with how to measure from the configuration; its label is `name`, or its own.

    Raises UserError if a choice does not exist, or the name cannot name a folder.
    """
    label = name or label_of(function)
    check_name("name", label)
    grads = any(tensor.requires_grad for tensor in tensors)
    passes = (("forward", "backward") if grads else ("forward",)) if asked.passes is None else asked.passes
    device = tensors[0].device.type
    for key in asked.choices:
        if key.partition(".")[0] not in CHOICES:
            names = ", ".join(CHOICES)
            hint = "if the function computes with it, give reference=, a function that does so rightly"
            raise UserError(f"{key} is none of the choices {names}: {hint}")
    typed = [*overrides_of(asked.choices), f"passes=[{','.join(passes)}]", f"device={device}", f"sweep={sweep}"]
    with hydra_aside():
        config = resolved_config(compose_config(typed, sweep), typed)
    plain = request_from_config(config, visible_gpus() if device == "cuda" else [])
    measuring = replace(plain.measuring, inputs=GIVEN)
    backend = {"_target_": "attn_exp.workloads.given.GivenFunction", "name": label}
    strides = [tuple(tensor.stride()) for tensor in tensors]
    how = {name: value for name, value in asdict(measuring).items() if name != "gold"}
    what = (_mark(function), asked.scale, _mark(asked.reference))
    identity = hashlib.sha256(repr([asdict(case), how, plain.compile, strides, *what]).encode())
    return replace(
        plain, job=f"{label}-{identity.hexdigest()[:10]}", model="given", case=case, backend=backend, source={},
        measuring=measuring, label=f"{label} {case.label()}", profilers=(), config={"timer": config["timer"]},
    )  # fmt: skip


def label_of(function: "Callable[..., torch.Tensor]") -> str:
    """Return the name of a function, without what a folder's name cannot have."""
    return re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_")


def measured_alike(
    requests: Sequence[Request],
    functions: "Sequence[Callable[..., torch.Tensor]]",
    tensors: "tuple[torch.Tensor, ...]",
    asked: Asked,
) -> list[Record]:
    """Return a record of each function; several are measured interleaved.

    Raises UserError if the reference cannot be used.
    """
    # Not before: mistakes are told before seconds of importing.
    from attn_exp.worker.given import measure_tensors

    try:
        return measure_tensors(requests, functions, tensors, scale=asked.scale, reference=asked.reference)
    except ValueError as error:
        raise UserError(f"the reference cannot be used: {first_line(error)}") from error


def case_of(tensors: "tuple[torch.Tensor, ...]", asked: Asked) -> Case:
    """Return the case of q, k and v. Raises UserError if they are not those of one."""
    import torch

    for name, tensor in zip(_NAMES, tensors, strict=True):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UserError(f"{name} is a {type(tensor).__name__}: give a torch.Tensor")
        if tensor.ndim != 4:
            raise UserError(f"{name} has the shape {tuple(tensor.shape)}: give (batch, heads, length, dim)")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UserError(f"{name} is on {tensor.device}: tensors on a CPU or an NVIDIA GPU can be timed")
    q, k, v = tensors
    dtype = str(q.dtype).removeprefix("torch.")
    for name, tensor in (("k", k), ("v", v)):
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise UserError(f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: give the same")
    if dtype not in DTYPE_BYTES or dtype in (E4M3, INT8):
        dtypes = ", ".join(name for name in DTYPE_BYTES if name not in (E4M3, INT8))
        raise UserError(f"the tensors are {dtype}: give one of {dtypes}")
    if not (k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(_NAMES, tensors, strict=True))
        raise UserError(f"the shapes do not fit each other: {shapes}")
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if not bool(tensor.detach().isfinite().all()):
            raise UserError(f"{name} has values that are not finite, of which no result is right")
    return Case(
        batch=q.shape[0], q_heads=q.shape[1], kv_heads=k.shape[1], q_len=q.shape[2], kv_len=k.shape[2],
        head_dim=q.shape[3], value_dim=v.shape[3], dtype=dtype, causal=asked.causal, align=asked.align or "top_left",
        layout="bshd" if q.transpose(1, 2).is_contiguous() and not q.is_contiguous() else "bhsd",
    )  # fmt: skip


def _mark(function: Any) -> Any:
    """Return what tells functions of one name apart."""
    if isinstance(function, functools.partial):
        return _mark(function.func), repr(function.args), repr(function.keywords)
    code = getattr(function, "__code__", None)
    return _mark_of_code(code) if isinstance(code, CodeType) else type(function).__qualname__


def _mark_of_code(code: CodeType) -> Any:
    constants = [_mark_of_code(constant) if isinstance(constant, CodeType) else constant for constant in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, repr(constants)


def overrides_of(choices: Mapping[str, Any]) -> list[str]:
    """Return choices as overrides.

    A list is several values, one job each. A tuple is one value that is a list, as is a list for a key that takes one
    (`passes`, `lengths`). A mapping sets the keys inside: `model={"head_dim": 64}` is `model.head_dim=64`. Text is as
    typed in a command line, so that `backend="flash,math"` is two choices. Raises UserError if a value cannot be
    written as an override.
    """
    overrides = []
    for key, value in choices.items():
        if isinstance(value, Mapping):
            overrides += overrides_of({f"{key}.{inside}": setting for inside, setting in value.items()})
        else:
            overrides.append(f"{key}={_choice_values(key, value)}")
    return overrides


def _choice_values(key: str, value: Any) -> str:
    listed = isinstance(value, list) and (key not in _LISTS or any(isinstance(item, (list, tuple)) for item in value))
    if not listed:
        return _choice_text(key, value)
    if not value:
        raise UserError(f"{key}=[] has no value: leave {key} out, or give it one")
    return ",".join(_choice_text(key, item) for item in value)


def _choice_text(key: str, value: Any) -> str:
    """Return one value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        quoted = str(value).replace("'", "\\'")
        return f"'{quoted}'"
    if isinstance(value, str):
        return value
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_choice_text(key, item) for item in value)}]"
    if str(value) in _SHORT:
        return _SHORT[str(value)]
    raise UserError(f"{key}={value!r} is a {type(value).__name__}: give text, a number, a list or a mapping of these")
