"""python -m attn_exp.compare sweep=NAME [baseline=BACKEND] [against=NAME] [KEY=VALUE ...]

Reads the records of sweeps and says which backend is faster where, by how much, and what cannot be told.

  python -m attn_exp.compare sweep=first baseline=flash
"""

import os
import sys
from collections.abc import Sequence

from attn_exp.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Compare; 0, 2 after a mistake of the user's."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    from attn_exp.compare.answer import answer
    from attn_exp.compare.choice import choice_of, format_of
    from attn_exp.compare.pages import page
    from attn_exp.compare.render import FORMATS

    try:
        choice = choice_of(arguments)
        found = answer(choice)
        print(FORMATS[format_of(choice)](page(found)))
    except UserError as error:
        print(f"attn_exp.compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
