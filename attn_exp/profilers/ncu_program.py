"""Find and run Nsight Compute's program, and explain its errors."""

import os
import re
import shutil
import subprocess
from pathlib import Path

# Where its packages, the CUDA toolkit and NVIDIA's containers install it; the newest is used.
PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu")
# The first version that supports Hopper.
LEAST_VERSION = (2022, 3)
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
    """Nsight Compute failed; `remedied` is whether the message says what to do."""

    def __init__(self, message: str, *, remedied: bool) -> None:
        super().__init__(message)
        self.remedied = remedied


def find_program(given: str | None, places: tuple[str, ...] = PLACES) -> Path:
    """Return the program: the given one, the one on PATH, or one in a usual place.

    Raises:
        NcuError: there is none.
    """
    if given is not None:
        path = shutil.which(given)
        if path is None:
            raise NcuError(f"profiler.ncu.program={given} is no program: give the path of ncu", remedied=True)
        return Path(path)
    on_path = shutil.which("ncu")
    if on_path is not None:
        return Path(on_path)
    usual = [path for place in places for path in Path("/").glob(place.lstrip("/")) if shutil.which(path)]
    if not usual:
        raise NcuError(
            "Nsight Compute is not installed: install nsight-compute, or set profiler.ncu.program=/path/to/ncu",
            remedied=True,
        )
    return max(usual, key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))])


def check_version(program: Path) -> str:
    """Return the program's version, such as `2025.3.1`.

    Raises:
        NcuError: it prints no version, or is older than `LEAST_VERSION`.
    """
    output = ask(program, "--version")
    match = re.search(r"Version (\d+)\.(\d+)[.\d]*", output)
    if match is None:
        raise NcuError(f"{program} --version prints no version: is it Nsight Compute?", remedied=True)
    if (int(match[1]), int(match[2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise NcuError(
            f"{program} is version {match[1]}.{match[2]}: install Nsight Compute {least} or newer, or set "
            "profiler.ncu.program=/path/to/ncu",
            remedied=True,
        )
    return match[0].removeprefix("Version ").rstrip(".")


def ask(program: Path, *arguments: str, limit_s: float = _ASK_LIMIT_S) -> str:
    """Run the program and return what it prints.

    Raises:
        NcuError: it cannot be run, fails, or does not end.
    """
    try:
        ran = subprocess.run(
            [program, *arguments],
            capture_output=True,
            check=False,
            timeout=limit_s,
            env=plain_environment(),
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise NcuError(f"{program} cannot be run ({error.strerror}): give another ncu", remedied=True) from error
    except subprocess.TimeoutExpired as error:
        raise NcuError(f"{program} {arguments[0]} did not end within {limit_s:g} s", remedied=False) from error
    if ran.returncode:
        raise failure(ran.stdout + ran.stderr, ran.returncode)
    return ran.stdout


def plain_environment() -> dict[str, str]:
    """Return the environment with the C locale's numbers and without variables of other profilers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_INJECTION")}
    return {**kept, "LC_ALL": "C.UTF-8"}


def failure(output: str, code: int) -> NcuError:
    """Return an error that explains the program's output in one sentence, with a remedy if there is one."""
    for pattern, sentence in _REMEDIES:
        if re.search(pattern, output):
            return NcuError(sentence, remedied=True)
    refused = _UNSUPPORTED.search(output)
    if refused:
        words = refused[1].strip().rstrip(".")
        return NcuError(f"ncu cannot read this GPU's counters ({words}): profile on another GPU", remedied=True)
    unknown = sorted(set(re.findall(r"(?i)failed to find metric:?\s+'?([\w.:]+)", output)))
    if unknown:
        return NcuError(f"ncu does not know {', '.join(unknown)}: leave it out of profiler.ncu.metrics", remedied=True)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]
    message = errors[0].rstrip(".") if errors else "it printed no reason"
    # The job's own last line: a GPU's memory may not hold the job twice.
    own = [line for line in lines if not line.startswith("==")]
    if own and "application returned" in message:
        message = f"{message}: {own[-1][:_LONGEST_LINE]}"
    return NcuError(f"ncu ended with code {code}: {message}", remedied=False)
