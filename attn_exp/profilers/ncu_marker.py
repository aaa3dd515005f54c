"""The name of the kernel that marks the start of a pass for Nsight Compute."""

# The kernel that `torch.cuda._sleep` launches. One stands between two passes: backward kernels are launched by
# autograd's own thread, so NVTX's push and pop, which are a thread's, cannot tell passes apart.
MARKER = "spin_kernel"
