"""python -m quitter: takes the worker's place; what it does after a job is said by a file `then` in the job's folder.

`exit` ends the process between two jobs, `bytes` writes what is not UTF-8 to the parent, `die` ends it within the job.
"""

import argparse
import json
import os
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--reply-fd", type=int)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args()
    replies = os.fdopen(given.reply_fd, "wb", buffering=0)
    replies.write(b"ready\n")
    for line in sys.stdin:
        name = line.rstrip("\n")
        folder = Path(json.loads(name))
        then = (folder / "then").read_text()
        replies.write(f"begin {name}\n".encode())
        if then == "die":
            os._exit(3)
        if then == "bytes":
            replies.write(b"\xff\xfe\x80\n")
        (folder / "by").write_text(str(os.getpid()))
        replies.write(f"end {name}\n".encode())
        if then == "exit":
            os._exit(4)


if __name__ == "__main__":
    main()
