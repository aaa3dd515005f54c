"""Call each pass of a job once, for a profiler that observes the whole process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from attn_exp.backends.base import load_backend, step
from attn_exp.backends.compile import use_caches
from attn_exp.core.record.request import Request
from attn_exp.timers.call import synchronize
from attn_exp.worker.attempt import marked
from attn_exp.worker.prepare import calls_for
from attn_exp.workloads import workload_of

_WARM_CALLS = 2


def run_once(request: Request) -> None:
    """Prepare the job as its worker did, warm each pass up, and call it once with the profiler on.

    Nothing is checked or timed: the job has been measured before.
    """
    device = request.device
    if request.gpu_uuid is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = request.gpu_uuid
    if device == "cuda":
        # As in the worker: CUDA graphs cannot be captured on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream())
    with_gradients = request.measuring.with_gradients
    backend, workload = load_backend(request.backend), workload_of(request.case)
    measuring = request.measuring
    inputs = workload.make_inputs(
        request.case, device, measuring.seed, with_gradients=with_gradients, kind=measuring.inputs
    )
    use_caches(request)
    calls = calls_for(request, workload, backend, inputs)
    with calls.scope():
        timed = {"forward": calls.forward}
        out = calls.forward()
        if with_gradients:
            timed["backward"] = calls.backward(out)  # type: ignore[assignment]
            timed["step"] = partial(step, calls)  # type: ignore[assignment]
        for direction in request.measuring.passes:
            for _ in range(_WARM_CALLS):
                timed[direction]()
        synchronize(device)
        with _profiled(device):
            for index, direction in enumerate(request.measuring.passes):
                if index and device == "cuda":
                    torch.cuda._sleep(1)
                    synchronize(device)
                with marked("job", request.job, device), marked("pass", direction, device):
                    timed[direction]()
                    synchronize(device)


@contextmanager
def _profiled(device: str) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.cudart().cudaProfilerStart()
    yield
    if device == "cuda":
        torch.cuda.cudart().cudaProfilerStop()
