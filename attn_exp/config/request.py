"""Make the request that a worker gets from a resolved configuration, and the identity that names its folder."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from attn_exp.core.case.case import NORMAL, PASSES, WORKLOADS, Case
from attn_exp.core.case.features import PAGES
from attn_exp.core.case.fields import case_from_config
from attn_exp.core.catalogue import about_backend, backend_options, input_kinds, timer_choice, timers
from attn_exp.core.conf import choice, conf_folder, read_yaml
from attn_exp.core.errors import UserError, check_name, nearest
from attn_exp.core.host.nvml import GpuInfo
from attn_exp.core.record.request import Compile, Measuring, Request, backend_label
from attn_exp.core.record.status import STATUSES
from attn_exp.core.redaction import held_secret
from attn_exp.core.source import described, identity
from attn_exp.core.text import flat

REGIMES = ("burst", "sustained")
COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Keys whose values are true and false, and those with a list of values.
_SWITCHES = ("deterministic", "determinism", "accumulate", "caches", "dry_run", "save_plots", "quiet", "private")
_CHOICES = {"regime": REGIMES, "l2": ("cold", "written"), "gold": ("float32", "float64", "eager")}
# Options that are younger than the identity, as every job has them that does not set them.
_LATER = {"inputs": NORMAL, "determinism": False, "accumulate": False, "gold": "float32"}
# The regime in the identity of a job. `sustained` was the default of methods 1 to 4.
_REGIMES_HASHED = {"burst": "sustained", "sustained": "under load"}
# Fields of a case that are older than the identity, which has others where they are set.
_FIRST_FIELDS = {
    *("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "dtype"),
    *("causal", "align", "window", "softcap", "lengths", "layout"),
}
# The mistake in a profiler's option, by the type of its default.
_KINDS = {bool: "neither true nor false", int: "not a whole number from 1 on", list: "not a list: write [...]"}
# Every configuration has these groups, and these keys in them.
_GROUPS = ("model", "dtype", "inputs", "backend", "timer", "isolation", "tracker", "stopping", "compile")
_INSIDE = (("timer", "name"), ("timer", "also"), ("dtype", "name"), ("inputs", "name"))
# Not kept in the record: where results go does not describe the job, and a tracking URI may hold a password.
_NOT_KEPT = (
    "tracker",
    "folder",
    "dry_run",
    "save_plots",
    "columns",
    "show",
    "format",
    "quiet",
    "private",
    "gpu_wait_s",
)
# A worker needs the values of these.
_BY_VALUE = ("backend", "compile", "profiler", "timer")


def chosen_profilers(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the options of each chosen profiler, with its `name` and `_target_`.

    Raises UserError if a profiler has no class, a wrong option, or a name that cannot name a folder.
    """
    # Hydra leaves the key out for `profiler=[]`.
    chosen = config.get("profiler") or {}
    if not isinstance(chosen, dict):
        raise UserError(f"profiler={chosen} is no choice of profilers: write profiler=torch or profiler=[proton,torch]")
    if "_target_" in chosen:
        raise UserError("a profiler of your own begins with the line # @package profiler.NAME: add it to its YAML")
    checked = [_checked(str(name), options) for name, options in chosen.items()]
    # inductor joins the results of the others, so it runs after them in whatever order they were typed.
    return tuple(sorted(checked, key=lambda options: options["name"] == "inductor"))


def _checked(name: str, options: Any) -> dict[str, Any]:
    target = options.get("_target_") if isinstance(options, dict) else None
    if not isinstance(target, str) or not target:
        raise UserError(f"profiler.{name} has no class: choose profiler={name}, or set +profiler.{name}._target_=...")
    if not name.isidentifier() or name in PASSES:
        raise UserError(f"profiler.{name} cannot be the name of a profiler: use letters, digits and '_'")
    # The options in the YAML of one of our profilers; none if the profiler or its class is the user's own.
    ours = choice("profiler", name)
    for key, default in ours.items() if ours.get("_target_") == target else ():
        value, kind = options.get(key), type(default)
        valid = type(value) is kind and (kind is not int or value > 0)
        if kind in _KINDS and not valid:
            raise UserError(f"profiler.{name}.{key}={value} is {_KINDS[kind]}; it is {default} by default")
    return {**options, "name": name}


def request_from_config(config: dict[str, Any], gpus: list[GpuInfo]) -> Request:
    """Return the request that a resolved configuration describes; `device=auto` may use the `gpus`.

    Raises UserError if it cannot be measured as typed.
    """
    _check_whole(config)
    # First: a variable of the environment is not told as an option that does not exist.
    kept = _kept(config)
    try:
        case = case_from_config(config)
    except UserError as error:
        for key, written in (config.get("from_environment") or {}).items():
            if str(error).startswith(f"{key}='"):
                decoded = re.sub(r"\$\{oc\.env:[^}]*\}", r"${oc.decode:\g<0>}", str(written))
                raise UserError(f"{key} is text, as all of the environment is: write '{key}=\"{decoded}\"'") from error
        raise
    device = resolve_device(str(config["device"]), gpus)[0]
    backend = _chosen_backend(config)
    about_backend(backend["name"], config["backend"].get("about"))
    check_name("sweep", config["sweep"])
    measuring = _measuring(config, device)
    compile_ = _compile(config["compile"])
    for status in config["stop_on"] if isinstance(config["stop_on"], list) else [config["stop_on"]]:
        if not isinstance(status, str) or status not in STATUSES:
            near = nearest(str(status), STATUSES)
            raise UserError(f"stop_on={status} is no list of statuses: {near}write stop_on=[inaccurate]")
    limit_mb = config["profiler_limit_mb"]
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, (int, float)) or limit_mb <= 0:
        raise UserError(f"profiler_limit_mb={limit_mb} is not a positive number of megabytes")
    unusual = [] if measuring.inputs == NORMAL else [f"inputs {measuring.inputs}"]
    unusual += ["accumulate"] if measuring.accumulate else []
    unusual += [f"gold {measuring.gold}"] if measuring.gold != "float32" else []
    request = Request(
        # Its identity follows.
        job=backend["name"],
        sweep=config["sweep"],
        # A shard is a model of its own wherever models are shown.
        model=str(config["model"].get("name", "custom")) + (f"-tp{config['tp']}" if config["tp"] != 1 else ""),
        device=device,
        case=case,
        backend=backend,
        measuring=measuring,
        compile=compile_,
        caches=config["caches"],
        source=described(backend["_target_"]),
        profilers=chosen_profilers(config),
        profiler_limit_mb=float(limit_mb),
        label=" ".join([backend_label(backend["name"], compile_), case.label(), *unusual]),
        config=kept,
    )
    return replace(request, job=f"{backend['name']}-{_identity(request)}")


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of a resolved configuration: text from environment variables as `${oc.env:NAME}`.

    Raises UserError if an option is a secret, or comes from the environment and could not be kept by name.
    """
    kept = {key: value for key, value in config.items() if key not in (*_NOT_KEPT, "from_environment")}
    values = {key: str(value) for key, value in flat(kept).items()}
    if (name := held_secret(values.values())) is not None:
        key = next(key for key, value in values.items() if held_secret([value]))
        raise UserError(
            f"{key} holds the value of the variable {name}, and would be kept in the record: let the backend read the "
            f"variable itself, with isolation.variables=[{name}]"
        )
    for key, written in config.get("from_environment", {}).items():
        kept = _by_name(kept, key, written)
    return kept


def _by_name(kept: Mapping[str, Any], key: str, written: Any) -> dict[str, Any]:
    """Return the kept configuration with the text of one key as it was written."""
    changed = group = {**kept}
    *parents, last = key.split(".")
    for name in parents:
        if not isinstance(group.get(name), dict):
            return changed
        group[name] = group = {**group[name]}
    value = group.get(last)
    if not any(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
        return changed
    if key.partition(".")[0] in _BY_VALUE:
        name = (re.findall(r"oc\.env:\s*(\w+)", str(written)) or ["NAME"])[0]
        raise UserError(
            f"{key} comes from the environment ({written}), and would be kept in the record: let the backend read the "
            f"variable itself, with isolation.variables=[{name}]"
        )
    if isinstance(value, str):
        group[last] = written
    return changed


def _check_whole(config: dict[str, Any]) -> None:
    """Raise UserError if a group or key was deleted, a group replaced by a single value, or a value is no choice."""
    for key in _GROUPS:
        if not isinstance(config.get(key), dict):
            raise UserError(f"{key} cannot be removed or replaced by a value: choose {key}=NAME")
    if missing := read_yaml(conf_folder() / "config.yaml").keys() - {"defaults", "hydra"} - config.keys():
        raise UserError(f"there is no {min(missing)}: leave ~{min(missing)} out")
    for group, key in _INSIDE:
        if key not in config[group]:
            raise UserError(f"{group} has no {key}: leave ~{group}.{key} out, or add {key} to its YAML")
    for key in _SWITCHES:
        if not isinstance(config[key], bool):
            raise UserError(f"{key}={config[key]} is neither true nor false")
    for key, choices in _CHOICES.items():
        if config[key] not in choices:
            raise UserError(f"{key}={config[key]} is not one of {', '.join(choices)}")
    wait_s = config["gpu_wait_s"]
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
        raise UserError(f"gpu_wait_s={wait_s} is not a number of seconds: write gpu_wait_s=3600")


def resolve_device(device: str, gpus: list[GpuInfo]) -> tuple[str, list[GpuInfo]]:
    """Return `cpu` or `cuda`, and the GPUs that the choice allows. Raises UserError if there is no such device."""
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu", []
    if device in ("auto", "cuda"):
        if not gpus:
            raise UserError("device=cuda needs an NVIDIA GPU and there is none here: use device=cpu or device=auto")
        return "cuda", gpus
    match = re.fullmatch(r"cuda:([0-9]{1,4})", device)
    if not match:
        raise UserError(f"device={device} is none of auto, cpu, cuda, cuda:N")
    index = int(match[1])
    if index >= len(gpus):
        indices = f"cuda:0 to cuda:{len(gpus) - 1}" if gpus else "none"
        raise UserError(f"device={device} is not there; the GPUs here: {indices}, use device=auto or device=cpu")
    return "cuda", [gpus[index]]


def _chosen_backend(config: dict[str, Any]) -> dict[str, Any]:
    """Return the named options of the chosen backend, of which `deterministic=true` sets the one of that name.

    Raises UserError for an option that the YAML of one of our backends does not declare.
    """
    chosen = dict(config["backend"])
    chosen |= {"deterministic": True} if config["deterministic"] and "deterministic" in chosen else {}
    backend = named_backend(chosen)
    declared = backend_options().get(backend["_target_"])
    if declared is not None:
        for option in sorted(backend.keys() - {"_target_", "name"} - declared):
            near = nearest(option, declared)
            choices = f"its options are {', '.join(sorted(declared))}" if declared else "it has none"
            raise UserError(f"backend={backend['name']} has no option '{option}': {near or choices}".rstrip())
    return backend


def named_backend(backend: dict[str, Any]) -> dict[str, Any]:
    """Return the backend's options with its name. No other class gets the name of one of ours."""
    target = backend.get("_target_")
    if not isinstance(target, str) or not target:
        raise UserError("the backend has no class: set backend._target_=package.module.Class, or choose backend=...")
    _check_keys("backend", backend)
    name = backend.get("name")
    ours = choice("backend", str(name))
    if name is None or (ours and target != ours["_target_"]):
        name = re.split(r"[.:]", target)[-1].lower()
    check_name("backend.name", name)
    # `about` describes the backend: it is not an option, and not part of the job's identity.
    about = backend.get("about")
    later = about.get("later") if isinstance(about, dict) else None
    # Younger than records: a job without it is the one that it was.
    younger = [key for key in later if isinstance(key, str)] if isinstance(later, list | tuple) else []
    left_out = {"about", *(key for key in younger if not backend.get(key))}
    return {key: value for key, value in backend.items() if key not in left_out} | {"name": name}


def _check_keys(key: str, tree: Any) -> None:
    """Raise UserError unless all keys are text, so that options can be sorted."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if isinstance(tree, dict) and not isinstance(name, str):
            raise UserError(f"{key} has the key {name!r}, which is no text: write '{name}'")
        _check_keys(f"{key}.{name}", value)


def _measuring(config: dict[str, Any], device: str) -> Measuring:
    choices, name, target = timers(), str(config["timer"]["name"]), config["timer"].get("_target_")
    if target is not None:
        check_name("timer.name", name)
        if name in choices and target != choices[name].target:
            raise UserError(f"timer.name={name} is a timer of attn_exp: give your own timer another name")
        choices = {name: timer_choice(config["timer"])} | choices
    chooses = config["timer"].get("chooses")
    timer = chooses.get(device, name) if isinstance(chooses, dict) else name
    here = [entry.name for entry in choices.values() if device in entry.devices]
    if timer not in here:
        where = "a GPU" if device == "cuda" else "the CPU"
        raise UserError(f"timer={name} does not measure on {where}: use timer=auto, or one of {', '.join(here)}")
    passes = config["passes"]
    passes = (passes,) if isinstance(passes, str) else tuple(passes) if isinstance(passes, list) else ()
    for direction in passes:
        if direction not in PASSES:
            raise UserError(f"passes has {direction!r}: {nearest(str(direction), PASSES)}use [forward,backward]")
    if not passes or len(set(passes)) != len(passes):
        raise UserError("passes must name some of forward, backward and step, each once: passes=[forward,backward]")
    also = config["timer"]["also"]
    if not isinstance(also, list):
        raise UserError(f"timer.also={also} is no list of timers: write timer.also=[] or timer.also=[event]")
    for extra in also:
        if extra not in list(choices):
            raise UserError(f"timer.also has {extra!r}: {nearest(str(extra), here)}the timers are {', '.join(here)}")
    values, kinds = str(config["inputs"]["name"]), input_kinds()
    if values not in kinds:
        near = nearest(values, kinds)
        raise UserError(f"inputs.name={values} does not exist: {near}the choices are {', '.join(kinds)}")
    if values != NORMAL and config["workload"] != WORKLOADS[0]:
        raise UserError(
            f"inputs={values} are values of q, k and v, which workload={config['workload']} computes itself: "
            "set inputs=normal, or workload=attention"
        )
    fields = {
        "timer": timer,
        "also": tuple(extra for extra in also if extra in here and extra != timer),
        "passes": tuple(direction for direction in PASSES if direction in passes),
        "seed": config["seed"],
        "regime": config["regime"],
        "l2": config["l2"] if device == "cuda" else "warm",
        "inputs": values,
        "determinism": config["determinism"],
        # A forward has nothing to accumulate.
        "accumulate": config["accumulate"] and passes != ("forward",),
        "gold": config["gold"],
        **config["stopping"],
    }
    if (gold := config["gold"]) != "float32" and config["workload"] != WORKLOADS[0]:
        raise UserError(f"gold={gold} is of attention alone: leave workload={config['workload']} or gold={gold} out")
    try:
        measuring = msgspec.convert(fields, Measuring)
    except msgspec.ValidationError as error:
        raise UserError(_misfit(str(error), fields)) from error
    if not 0 <= measuring.seed < 2**63:
        raise UserError(f"seed={measuring.seed} is not a whole number from 0 to 2^63 - 1")
    if not 0 < measuring.precision < 1:
        raise UserError(f"stopping.precision={measuring.precision} is not between 0 and 1")
    if not 2 <= measuring.min_rounds <= measuring.max_rounds <= 10_000:
        rounds = f"stopping.min_rounds={measuring.min_rounds} stopping.max_rounds={measuring.max_rounds}"
        raise UserError(f"{rounds} cannot be met: set 2 <= min_rounds <= max_rounds <= 10000")
    if not 0 <= measuring.budget_s <= 3600:
        raise UserError(f"stopping.budget_s={measuring.budget_s} is not between 0 and 3600 seconds")
    return measuring


def _misfit(error: str, fields: dict[str, Any]) -> str:
    """Return msgspec's ``Expected `int`, got `str` - at `$.seed` `` as a sentence about the key."""
    match = re.search(r"Expected `(\w+)`.*at `\$\.(\w+)", error)
    if not match:
        return f"the measuring options do not fit: {error}"
    kind = {"int": "a whole number", "float": "a number"}.get(match[1], "what it should be")
    key = "seed" if match[2] == "seed" else f"stopping.{match[2]}"
    return f"{key}={fields.get(match[2])} is not {kind}"


def _compile(config: dict[str, Any]) -> Compile:
    try:
        compile_ = msgspec.convert(config, Compile)
    except msgspec.ValidationError as error:
        raise UserError(f"compile does not fit ({error}): choose compile=default or another mode") from error
    _check_keys("compile.options", compile_.options)
    if compile_.mode not in COMPILE_MODES:
        near = nearest(compile_.mode, COMPILE_MODES)
        raise UserError(f"compile.mode={compile_.mode} is no mode: {near}choose one of {', '.join(COMPILE_MODES)}")
    if compile_.mode == "none" and (compile_.options or compile_.fullgraph or compile_.name):
        raise UserError("compile.options, compile.fullgraph and compile.name need a compilation: set compile=default")
    if compile_.name is not None:
        check_name("compile.name", compile_.name)
        if compile_.name in COMPILE_MODES:
            raise UserError(f"compile.name={compile_.name} is a mode of torch.compile: choose another name")
    return compile_


def _identity(request: Request) -> str:
    """Return a hash over what makes two jobs the same."""
    names = ("case", "backend", "measuring", "compile", "caches", "device")
    parts: dict[str, Any] = msgspec.to_builtins({name: getattr(request, name) for name in names})
    for name, usual in _LATER.items():
        if parts["measuring"][name] == usual:
            del parts["measuring"][name]
    # The default has the name that it had: jobs are found again, and measured again by the newer method.
    parts["measuring"]["regime"] = _REGIMES_HASHED[request.measuring.regime]
    for field in fields(Case):
        usual = PAGES[0] if field.name == "pages" and request.case.pages else field.default
        if field.name not in _FIRST_FIELDS and parts["case"][field.name] == usual:
            del parts["case"][field.name]
    if request.compile.name is None:
        # As before a compilation could have a name.
        del parts["compile"]["name"]
    if request.source:
        parts["source"] = identity(request.source)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]
