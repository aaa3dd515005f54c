"""Repairs of Triton 3.6's interpreter, which runs kernels in NumPy; call `repair` in a process of its own."""

from typing import Any

import numpy as np


def repair() -> None:
    """Loops whose bounds are arrays of one element (an error since NumPy 2.4), and products of bfloat16.

    The interpreter holds bfloat16 as uint16, and `tl.dot` multiplies these integers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = create_dot
