"""Triton's kernels on the simulated device, run by Triton's interpreter.

The interpreter copies tensors to the host and back. Here their memory is memory of the host, so that it gets
their addresses. A kernel counts as one operation.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from simulate_cuda import graphs


def install() -> None:
    """Let Triton's interpreter use the memory of the simulated device, if there is Triton."""
    try:
        import triton.language as tl
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
        from triton.runtime.jit import MockTensor
    except ImportError:
        return
    run, create_dot = GridExecutor.__call__, InterpreterBuilder.create_dot

    class Memory(MockTensor):  # type: ignore[misc]
        """The type and the address of a tensor, which it does not keep alive."""

        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor.dtype)
            address = tensor.data_ptr()
            self.data_ptr = lambda: address

    def of_memory(x: Any) -> Any:
        return Memory(x) if isinstance(x, Tensor) else x

    def launch(executor: Any, *arguments: Any, **named: Any) -> None:
        tensors = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
        is_fake = any(isinstance(x, FakeTensor) for x in tensors)
        if any(x.is_cuda for x in tensors):
            if not all(x.is_cuda for x in tensors):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            if not is_fake:
                arguments = tuple(map(of_memory, arguments))
                named = {name: of_memory(x) for name, x in named.items()}
            executor._init_args_hst = lambda *of_device: of_device
            executor._restore_args_dev = lambda *_: None
            number = graphs.keep(lambda: run(executor, *arguments, **named))
            torch.ops.simulate_cuda.launch(tensors, number)
        if not is_fake:
            run(executor, *arguments, **named)

    def dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        """The interpreter would multiply the bits of numbers in bf16 as integers."""
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(builder, a, b, *others)

    GridExecutor.__call__, InterpreterBuilder.create_dot = launch, dot
