"""Messages that one sentence does not solve: a stable code each, which is a section of docs/troubleshooting.md.

Codes are never given to another message: they stand in logs, issues and notes of users.
"""

import re

PAGE = "docs/troubleshooting.md"
# What the messages of a code have in common, as regular expressions; the first that is found counts.
TROUBLES = {
    # Of the command line: nothing was measured.
    "ae01": r"was written by a newer MLflow",
    "ae02": r"is not an MLflow server|refuses this user",
    "ae03": r"holds (the value of the variable|a token or key)",
    "ae04": r"is not a folder that only you can write to",
    "ae05": r" cannot be compared \(",
    "ae06": r"Slurm does not take the tasks",
    "ae07": r"^Ray at .* does not answer",
    "ae08": r"has its files in .*, which is not there",
    # Reasons of jobs. Those of the judge begin with the tensor, and may name several findings.
    "ae20": r"ran no kernel at all",
    "ae21": r"\bclaims /.*, but |and kernels of that name took",
    "ae22": r"out is as if ",
    "ae23": r"the first call was within tolerance|is the result of the first call's inputs",
    "ae24": r"on hard values",
    "ae25": r"wrote into its input",
    "ae26": r"off by .* of its norm",
    "ae27": r"is above .* (peak|matrix product)",
    "ae28": r"does not wait for",
    "ae29": r"OutOfMemoryError|out of memory",
    "ae30": r"the job took longer than",
    "ae31": r"the worker (was killed by|exited with code)",
    "ae32": r"no CUDA graph can hold this call",
    "ae33": r"a kernel needs .* of which this GPU has",
    "ae34": r"cannot import backend\._target_=",
}


def code_of(message: str) -> str | None:
    """Return the code of a message, None if its sentence is enough."""
    return next((code for code, pattern in TROUBLES.items() if re.search(pattern, message)), None)


def with_code(message: str) -> str:
    """Return a message with the place in the documentation that says more, if there is one."""
    code = code_of(message)
    return message if code is None else f"{message} [{PAGE}#{code}]"
