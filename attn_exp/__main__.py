"""python -m attn_exp: the same as `attn-exp`."""

import sys
from pathlib import Path


def main() -> None:
    """Run the command line, which says nothing more if Ctrl-C ends the imports before it."""
    try:
        from attn_exp.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        hides = Path(f"{error.name}.py")
        if error.name not in sys.stdlib_module_names or not hides.exists():
            raise
        sys.exit(f"attn-exp: {hides} in this folder hides Python's module {error.name}: rename it, or go elsewhere")
    run()


if __name__ == "__main__":
    main()
