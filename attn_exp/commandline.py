"""The command line: the command as it was typed, and the one that goes on with its sweep."""

import shlex
import sys

from attn_exp.redaction import redacted


def command_line() -> str:
    """The command as typed, passwords in URIs left out."""
    return redacted(shlex.join(["python", "-m", "attn_exp", *sys.argv[1:]]))


def resume_command(sweep: str) -> str:
    """The command that goes on with this sweep."""
    given = [argument for argument in sys.argv[1:] if not argument.startswith("sweep=")]
    return redacted(shlex.join(["python", "-m", "attn_exp", *given, f"sweep={sweep}"]))
