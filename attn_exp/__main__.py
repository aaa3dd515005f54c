"""python -m attn_exp: the same as `attn-exp`."""

from attn_exp.cli import main

if __name__ == "__main__":
    main()
