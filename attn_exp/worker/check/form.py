"""The form of results: exactly the tensors that a pass returns, with the case's shapes, dtype and device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_exp.attention.inputs import DifferentiableInputs
from attn_exp.attention.verdict import malformed
from attn_exp.core.record.checked import Form
from attn_exp.worker.attempt import Stopped

# Tensors by name: `out`, `dq`, `dk`, `dv`, `d_sink`, or a block's.
Results = dict[str, torch.Tensor]


class ResultForm:
    """Names what calls return, and refuses what has another form.

    A view, a lazy tensor or a wrong shape would be no attention, and an output without a graph has cost less.
    """

    def __init__(self, inputs: DifferentiableInputs, scales: Mapping[str, float]) -> None:
        self._like, self._scales = inputs.d_out, scales
        gradients = tuple(inputs.gradient_names)
        self._names = {"forward": ("out",), "backward": gradients, "step": ("out", *gradients)}
        leaves = dict(zip(inputs.gradient_names, inputs.leaves, strict=True))
        self._shapes = {name: tuple(leaf.shape) for name, leaf in ({"out": inputs.d_out} | leaves).items()}
        self._has_graph: bool | None = None

    def results(self, direction: str, returned: Any) -> Results:
        """Return what a call returned by name, without its graph.

        Raises Stopped if it is not what a call of that pass returns.
        """
        names = self._names[direction]
        tensors = (returned,) if direction == "forward" else returned
        if direction != "forward" and (not isinstance(tensors, Sequence) or len(tensors) != len(names)):
            count = len(tensors) if isinstance(tensors, Sequence) else type(tensors).__name__
            kind = "gradients" if direction == "backward" else "tensors"
            raise Stopped(
                "inaccurate", f"the {direction} returned {count}, not the {len(names)} {kind} {', '.join(names)}"
            )
        results: Results = {}
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is None:
                raise Stopped("inaccurate", f"the {direction} has no {name}")
            wrong = malformed(name, tensor, shape=self._shapes[name], like=self._like, scales=self._scales)
            if wrong:
                raise Stopped("inaccurate", f"{direction}: {wrong}")
            results[name] = tensor.detach()
        if "out" in names:
            self._check_graph(tensors[0])
        return results

    def _check_graph(self, out: torch.Tensor) -> None:
        """Raise Stopped unless an output has a graph as the first one had: without one there is less to do."""
        if self._has_graph is None:
            self._has_graph = out.requires_grad
        elif out.requires_grad != self._has_graph:
            which = "without" if self._has_graph else "with"
            raise Stopped("inaccurate", f"forward: the output of a later call is {which} a graph, unlike the first one")


def form_of(tensor: torch.Tensor) -> Form:
    """Return dtype, shape and strides of a tensor."""
    return Form(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), strides=tensor.stride())
