"""Compile the Triton kernels of a decoding step for a GPU that need not be there.

    python -m tests.support.compile_decoding_kernels COMPUTE_CAPABILITY

The exit status is not 0 if one does not compile, or needs more shared memory than such a GPU has.
"""

import sys
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mtrain.kernels.decoding_step import Allowed
from mtrain.kernels.triton.decoding import add_norm, attention
from mtrain.kernels.triton.next_tokens import best_continuations

# Bytes of shared memory that a program may use.
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 90: 232_448}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class Launch(NamedTuple):
    """A kernel and its arguments."""

    kernel: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def shared_memory(self, capability: int) -> int:
        """Compile the kernel for a compute capability; returns the bytes of shared memory of a program."""
        names = self.kernel.arg_names
        options = {name: value for name, value in self.keywords.items() if name not in names}
        given = dict(zip(names, self.args, strict=False)) | self.keywords
        signature, constants, aligned = {}, {}, {}
        for parameter in self.kernel.params:
            value, place = given[parameter.name], (parameter.num,)
            is_one = isinstance(value, int) and value == 1  # Triton compiles other code for it
            if parameter.is_constexpr or value is None or is_one:
                signature[parameter.name], constants[place] = "constexpr", value
                continue
            if isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned[place] = [["tt.divisibility", 16]]  # as Triton finds out when it runs a kernel
        source = ASTSource(self.kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return int(compiled.metadata.shared)


def launches(capability: int) -> list[Launch]:
    """All kernels, with arguments of many sizes."""
    recorded: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        recorded.append(Launch(kernel, args, keywords))

    JITFunction.run = record
    position, norm = torch.tensor([3]), nn.LayerNorm(1024)
    for dtype in (torch.float16 if capability < 80 else torch.bfloat16, torch.float32):
        x = torch.zeros(6, 1024)
        add_norm(x, x.to(dtype), norm, dtype, replace=False)
        add_norm(x, None, norm, dtype, replace=True)
        for width, beams in ((24, 1), (64, 5), (128, 64), (256, 1), (256, 64)):
            cache = torch.zeros(2, 2, 4, 8 * beams, width, dtype=dtype)
            rows = torch.zeros(2 * beams, 4 * width, dtype=dtype)
            past = torch.zeros(2, beams, 8 * beams, dtype=torch.uint8) if beams > 1 else None
            attention(torch.cat([rows] * 3, dim=1), cache, past, position, own=True)
            attention(rows, cache, None, torch.zeros(2, dtype=torch.int32), own=False)
    zeros = torch.zeros(2, dtype=torch.int64)
    plain = Allowed(position, zeros, 3)
    ruled = Allowed(position, zeros, 3, torch.zeros(32_000, dtype=torch.bool), zeros[:, None])
    for vocabulary, beams, allowed in ((32_000, 5, ruled), (250_000, 1, plain), (8_003, 64, plain)):
        best_continuations(torch.zeros(2 * beams, vocabulary), torch.zeros(2, beams), 2 * beams, *allowed)
    return recorded


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for launch in launches(capability):
        shared = launch.shared_memory(capability)
        print(launch.kernel.fn.__name__, launch.keywords, shared, flush=True)
        assert shared <= SHARED_MEMORY[capability]
