import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import attn_exp

PURE = {
    "case",
    "record",
    "flops",
    "stats",
    "metrics",
    "hardware",
    "profile",
    "profilers.choice",
    "profilers.chrome",
    "profilers.hatchet",
    "profilers.figures_csv",
    "roofline",
    "errors",
    "names",
    "redaction",
    "variables",
    "duel_metrics",
    "flags",
    "verdict",
    "calibration",
    "host",
    "litter",
    "tables",
    "words",
    "profilers.inductor_code",
    "profilers.inductor_run",
    "profilers.inductor_table",
    "profilers.ncu_metrics",
    "profilers.ncu_program",
    "profilers.ncu_csv",
    "profilers.ncu_table",
}
# A comparison answers at once: nothing heavy either, in the whole package. Those that read or show stand apart from
# those that only reckon.
COMPARE_READS = {"__main__", "answer", "mlflow", "published", "read", "render", "web"}
# Modules that may import torch. Whatever is not listed here must not: a new module is checked by default.
WORKER = {
    "accuracy",
    "backends.base",
    "backends.bshd",
    "backends.compiled",
    "backends.cudnn_case",
    "backends.cudnn_fp8",
    "backends.cudnn_graph",
    "backends.cudnn_plan",
    "backends.flex",
    "backends.fp8_formula",
    "backends.package",
    "backends.eager",
    "backends.fa2",
    "backends.fa3",
    "backends.fa4",
    "backends.helion",
    "backends.operators",
    "backends.te",
    "backends.xformers",
    "kernels.helion_attention",
    "kernels.launch",
    "kernels.triton_attention",
    "kernels.tuning",
    "backends.reference",
    "backends.sdpa",
    "backends.triton",
    "canaries",
    "ceilings",
    "compilation",
    "edges",
    "environment",
    "inputs",
    "attempt",
    "machine",
    "measure",
    "once",
    "prepare",
    "preload",
    "profilers.apart",
    "profilers.base",
    "profilers.inductor",
    "profilers.ncu",
    "profilers.proton",
    "profilers.proton_lines",
    "profilers.proton_session",
    "profilers.second_pass",
    "profilers.torch",
    "ranges",
    "quantise",
    "proofs.__main__",
    "proofs.alarms",
    "proofs.bench",
    "proofs.clocks",
    "proofs.verdicts",
    "survey",
    "timers",
    "timers.blocker",
    "timers.cpu",
    "timers.device",
    "timers.event",
    "timers.gpu",
    "timers.graph",
    "timers.kernel",
    "timers.loop",
    "timers.wall",
    "tolerance",
    "workloads",
    "workloads.attention",
    "workloads.base",
    "workloads.block",
    "workloads.block_inputs",
    "workloads.decoder_layer",
    "workloads.dit_block",
    "workloads.rotary",
}
# Imports every module named on the command line, in order, and prints what each brought in of the heavy packages.
_PROBE = """
import importlib, json, sys
heavy = ("torch", "hydra", "omegaconf", "mlflow", "numpy", "pandas", "matplotlib", "sqlite3", "tabulate")
seen, brought = set(), {}
for name in sys.argv[1:]:
    importlib.import_module("attn_exp." + name)
    brought[name] = [package for package in heavy if package in sys.modules and package not in seen]
    seen.update(brought[name])
print(json.dumps(brought))
"""


def modules():
    root = Path(attn_exp.__file__).parent
    found = {info.name.removeprefix("attn_exp.") for info in pkgutil.walk_packages([str(root)], "attn_exp.")}
    files = {".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")}
    # Folders without an __init__.py are invisible to pkgutil, but not to Python.
    return found | {name.removesuffix(".__init__") for name in files} - {"__init__"}


def brought(names):
    ran = subprocess.run([sys.executable, "-c", _PROBE, *names], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {name: packages for name, packages in json.loads(ran.stdout.splitlines()[-1]).items() if packages}


def test_pure_modules_import_nothing_heavy():
    assert modules() >= PURE
    assert brought(sorted(PURE)) == {}


def test_comparing_imports_nothing_heavy():
    names = {name for name in modules() if name.split(".")[0] == "compare"}
    assert {f"compare.{name}" for name in COMPARE_READS} <= names
    # sqlite3 comes with the module that reads a database, and only with that.
    assert brought(sorted(names - {"compare.mlflow"})) == {}


def test_what_only_reckons_neither_reads_nor_writes():
    folder = Path(attn_exp.__file__).parent / "compare"
    for path in folder.glob("*.py"):
        if path.stem not in COMPARE_READS | {"__init__", "result", "duels"}:
            text = path.read_text()
            for word in ("open(", "read_text", "read_bytes", "write_text", "print(", "os.environ"):
                assert word not in text, (path.name, word)


def test_no_module_outside_the_worker_imports_torch():
    names = sorted(modules() - WORKER)
    assert {name for name, packages in brought(names).items() if "torch" in packages} == set()


def test_the_list_of_worker_modules_holds_no_name_that_is_gone():
    assert WORKER - modules() == set()


def test_the_probe_sees_torch_where_it_is():
    assert "torch" in brought(["case", "inputs"])["inputs"]
