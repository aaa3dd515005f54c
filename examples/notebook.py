"""python examples/notebook.py SWEEP [AGAINST]: read records as objects and data frames, as in a notebook.

Each block is a cell. SWEEP and AGAINST are names of folders in multirun/, or paths.
"""

import sys

from attn_exp import compare, load

sweep, *against = sys.argv[1:]

# %% A sweep: its records without their samples, and a data frame with a row for each record and pass.
first = load(sweep)
frame = first.to_frame()
print(f"{len(first.results)} records, {len(first.broken)} broken files")
print(frame.groupby(["pass", "backend"])["time_us"].describe()[["count", "min", "50%", "max"]])

# %% One record with all its samples.
ok = next(result for result in first.results if result.status == "ok")
timing = ok.record().passes["forward"].timings[0]
print(f"{ok.label} {ok.case.label()}: {len(timing.times_us)} samples by {timing.timer}")

# %% The backends compared: which is fastest where, and the geometric mean of the speed-ups.
baseline = sorted({result.label for result in first.results})[0]
rivals = compare(first, baseline=baseline)
for mean in rivals.means:
    if mean.value is not None:
        print(f"{mean.direction} {mean.label}: {mean.value:.3f} x over {baseline}, {mean.n} cases")
print("\n".join(rivals.answer.lines()))
print(rivals.to_frame().pivot_table(index=["batch", "pass"], columns="backend", values="gain"))

# %% Against an earlier sweep: a verdict for each cell.
if against:
    changes = compare(first, against[0], margin=0.05)
    print(changes.counts)
    print(changes.to_frame()[["backend", "batch", "pass", "verdict", "change", "change_low", "change_high"]])
