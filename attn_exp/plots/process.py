"""Draw a part of a sweep's charts in a process of its own: `python -m attn_exp.plots.process PART PARTS PARENT`.

What draws is imported while the sweep's jobs are measured. The sweep comes as a line of JSON on standard input, the
`Task`, and is answered by one, the `Done`.
"""

import contextlib
import gc
import sys
from pathlib import Path

import msgspec

from attn_exp.compare.answer import compare_read
from attn_exp.compare.choice import Choice
from attn_exp.core.errors import first_line
from attn_exp.core.process import die_with_parent
from attn_exp.plots.all import import_drawing, write_charts
from attn_exp.plots.task import FEWEST, Done, Task
from attn_exp.results.read import read_folder


def done(task: Task, part: int, parts: int) -> Done:
    """Draw one part of a task."""
    try:
        sweep = read_folder(Path(task.sweep))
        if sum(result.status == "ok" for result in sweep.results) < FEWEST:
            return Done()
        comparison = compare_read(Choice(), [sweep])
        late = list[bool]()
        written = write_charts(
            comparison,
            Path(task.into),
            limit_s=task.limit_s,
            part=part,
            parts=parts,
            left_out=lambda: late.append(True),
        )
    except Exception as error:  # libraries that draw may raise anything, and nothing here ends a sweep
        return Done(mistake=first_line(error))
    return Done(files=tuple(path.name for path in written), left_out=bool(late))


def main(part: int, parts: int, parent: int) -> None:
    """Wait for a task, and draw a part of it."""
    die_with_parent(parent)
    # It ends soon: looking for garbage takes a tenth of its time.
    gc.disable()
    with contextlib.suppress(ImportError):  # the task then says what is missing
        import_drawing()
    line = sys.stdin.buffer.readline()
    if line:
        answer = done(msgspec.json.decode(line, type=Task), part, parts)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
