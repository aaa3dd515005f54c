"""python -m cheats.check [WORD ...]: measure the entries whose group or name has one of the words; say what fails."""

import contextlib
import io
import re
import signal
import sys
import time

import torch

from cheats.corpus import load
from cheats.run import outcome, shared_machine

LIMIT_S = 40


def too_long(*_: object) -> None:
    raise TimeoutError(f"it took longer than {LIMIT_S} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    machine, bad, total = shared_machine(), 0, 0.0
    words, every = [word for word in sys.argv[1:] if word != "-v"], "-v" in sys.argv
    for entry in load():
        if (
            entry.worker
            or entry.device != "cpu"
            or (words and not any(word in f"{entry.group} {entry.name}" for word in words))
        ):
            continue
        began = time.perf_counter()
        signal.alarm(LIMIT_S)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            record, good = outcome(entry, machine)
        signal.alarm(0)
        spent = time.perf_counter() - began
        total += spent
        right = record.status in entry.statuses and (
            entry.words is None or re.search(entry.words, record.reason or "", re.IGNORECASE)
        )
        right = right and (good is None or good.status == "ok")
        bad += not right
        if not right or every:
            print(f"{'   ' if right else 'BAD'} {entry.group:10} {entry.name:34} {spent:5.2f} s {record.status}: "
                  f"{record.reason} {'' if good is None else good.reason}", flush=True)  # fmt: skip
            if record.status == "error":
                print("      ", " | ".join(errors.getvalue().strip().splitlines()[-3:]))
    print(f"{bad} wrong, {total:.1f} s")
