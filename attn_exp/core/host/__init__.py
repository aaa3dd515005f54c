"""The machine: GPUs, processor, clocks, processes and homes, without torch."""
