"""python -m attn_exp: the same as `attn-exp`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # The current folder comes last: a file secrets.py or numpy.py in it hides no module.
    sys.path.append(sys.path.pop(0))


def main() -> None:
    """Run the command line, which says nothing more if Ctrl-C ends the imports before it."""
    try:
        from attn_exp.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
