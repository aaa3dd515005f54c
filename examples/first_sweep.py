"""python examples/first_sweep.py [KEY=VALUE ...]: run a sweep from Python and print the fastest backend of each case.

Jobs run in a process of their own, so that a crashing kernel cannot end this program; run it again to resume.
"""

import sys

import attn_exp


def main() -> None:
    # The same as `batch=[1, 2]`, as text: what is typed after it replaces it.
    sweep = attn_exp.run("backend=flash,math", "batch=1,2", "seq_len=64", "sweep=from_python", *sys.argv[1:])
    for result in sweep:
        if result.status != "ok":
            print(f"{result.label} {result.case.label()}: {result.status}: {result.reason}")
    print(sweep.answer)

    for row in sweep.rivals.rows:
        if row.best:  # the fastest, or too close to it to call
            print(f"{row.cell.direction} {row.cell.result.case.label()}: {row.label}")


if __name__ == "__main__":
    main()
