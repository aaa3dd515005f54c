"""Tune an option of a kernel: Optuna chooses the values to measure.

Run it after `pip install 'attn_exp[optuna]' ./examples/custom_backend`, whose backend it tunes:

    python examples/tune_options.py [KEY=VALUE ...]

Another backend is tuned in the same way, flex for example with `"backend=flex"` and
`"+backend.kernel_options.BLOCK_M=choice(32,64,128)"`.
"""

import sys
from pathlib import Path

import attn_exp

CHOICES = Path(__file__).resolve().parent / "custom_backend" / "conf"


def main(own: list[str]) -> None:
    """Search, and print the best options with their time in microseconds."""
    attn_exp.run(
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=12",
        "hydra.sweeper.n_jobs=1",
        "backend=sliced",
        "backend.rows=choice(16,32,64,128,256)",
        *own,
        config_dir=CHOICES,
        sweep="tuned",
    )
    print(Path("multirun/tuned/optimization_results.yaml").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
