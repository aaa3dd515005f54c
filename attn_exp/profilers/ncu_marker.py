"""The name of the kernel that marks the start of a pass for Nsight Compute."""

# The kernel that `torch.cuda._sleep` launches; one runs between two passes. Autograd launches backward kernels from its
# own thread, so NVTX's push and pop, which belong to a thread, cannot separate the passes.
MARKER = "spin_kernel"
