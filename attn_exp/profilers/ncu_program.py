"""Find and run Nsight Compute's program, and explain its errors."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from attn_exp.backends.package import Unavailable

# Places where its packages, the CUDA toolkit and NVIDIA's containers install it; the newest is used.
PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu")
_ASK_LIMIT_S = 60.0
_LONGEST_LINE = 150
# Patterns of its output and the messages that replace it, tried in this order.
_PERMISSION = (
    "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0, give the container CAP_SYS_ADMIN, or run as root"
)
_REMEDIES = (
    (r"ERR_NVGPUCTRPERM", _PERMISSION),
    (
        r"(?i)driver resource was unavailable|another .*tool.* collecting",
        "another tool reads the GPU's performance counters: end it, for DCGM with dcgmi profile --pause",
    ),
    (
        r"(?i)nsight-compute-lock",
        "ncu cannot write its lock file into the folder for temporary files: set TMPDIR to a folder of your own",
    ),
    (
        r"(?i)driver is not compatible|driver version .*insufficient|UnsupportedDriver",
        "ncu does not fit the installed driver: install the Nsight Compute that comes with this CUDA version, or set "
        "profiler.ncu.program=/path/to/ncu",
    ),
)
_UNSUPPORTED = re.compile(r"(?i)==ERROR==\s*(.*(?:not supported|unsupported|no supported).*)")


class NcuError(Exception):
    """Nsight Compute failed; the message says how."""


def find_program(given: str | None, places: tuple[str, ...] = PLACES) -> Path:
    """Return the program: the given one, the one on PATH, or one in a usual place.

    Raises Unavailable if there is none.
    """
    if given is not None:
        path = shutil.which(given)
        if path is None:
            raise Unavailable(f"profiler.ncu.program={given} is no program: give the path of ncu")
        return Path(path)
    on_path = shutil.which("ncu")
    if on_path is not None:
        return Path(on_path)
    usual = [path for place in places for path in Path("/").glob(place.lstrip("/")) if shutil.which(path)]
    if not usual:
        raise Unavailable(
            "Nsight Compute is not installed: install nsight-compute, or set profiler.ncu.program=/path/to/ncu"
        )
    return max(usual, key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))])


def ask(program: Path, *arguments: str) -> str:
    """Run the program and return what it prints.

    Raises Unavailable if it fails and the message says what to do, NcuError if it fails otherwise.
    """
    ran = subprocess.run(
        [program, *arguments],
        capture_output=True,
        check=False,
        timeout=_ASK_LIMIT_S,
        env=plain_environment(),
        encoding="utf-8",
        errors="replace",
    )
    if ran.returncode:
        raise failure(ran.stdout + ran.stderr, ran.returncode)
    return ran.stdout


def plain_environment() -> dict[str, str]:
    """Return the environment with the C locale's numbers and without variables of other profilers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_INJECTION")}
    return {**kept, "LC_ALL": "C.UTF-8"}


def failure(output: str, code: int) -> Exception:
    """Return an error that explains the program's output in one sentence: `Unavailable` if there is a remedy."""
    for pattern, sentence in _REMEDIES:
        if re.search(pattern, output):
            return Unavailable(sentence)
    refused = _UNSUPPORTED.search(output)
    if refused:
        words = refused[1].strip().rstrip(".")
        return Unavailable(f"ncu cannot read this GPU's counters ({words}): profile on another GPU")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    message = errors[0].rstrip(".") if errors else "it printed no reason"
    # The job's own last line: a GPU's memory may not hold the job twice.
    own = [line for line in lines if not line.startswith("==")]
    if own and "application returned" in message:
        message = f"{message}: {own[-1][:_LONGEST_LINE]}"
    return NcuError(f"ncu ended with code {code}: {message}")
