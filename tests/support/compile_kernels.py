"""Compile all Triton kernels for a GPU that need not be there.

    python -m tests.support.compile_kernels COMPUTE_CAPABILITY

The exit status is not 0 if one does not compile, or needs more shared memory than such a GPU has.
"""

import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mtrain.kernels.decoding_step import Allowed
from mtrain.kernels.dropout import HashKey
from mtrain.kernels.sequences import Packed
from mtrain.kernels.triton.attention import short_attention
from mtrain.kernels.triton.cross_entropy import fused_cross_entropy
from mtrain.kernels.triton.decoding import add_norm, attention
from mtrain.kernels.triton.dropout import hashed_dropout
from mtrain.kernels.triton.mixed_linear import sum_over_tokens
from mtrain.kernels.triton.next_tokens import append_tokens, best_continuations, best_tokens
from mtrain.kernels.triton.norm import norm_branch
from mtrain.kernels.triton.tiles import TILES, suits_short_attention

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
            varies = parameter.do_not_specialize, parameter.do_not_specialize_on_alignment
            is_one = isinstance(value, int) and value == 1 and not varies[0]  # other code is compiled for it
            if parameter.is_constexpr or value is None or is_one:
                signature[parameter.name], constants[place] = "constexpr", value
                continue
            if isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            is_multiple = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
            if is_multiple and not any(varies):
                aligned[place] = [["tt.divisibility", 16]]  # as Triton finds out when it runs a kernel
        source = ASTSource(self.kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return int(compiled.metadata.shared)


def recorded(work: Callable[[int], None], capability: int) -> list[Launch]:
    """The kernels that work launches. They are not run."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(kernel, args, keywords))

    JITFunction.run = record
    work(capability)
    return launches


def train(capability: int) -> None:
    """The kernels of a training step, forward and backward."""
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    key, suitable = HashKey(*torch.zeros(2, 1, dtype=torch.int32)), 0
    x, y = torch.zeros(2, 48, 64, dtype=dtype, requires_grad=True).unbind()
    for relu, residual in ((False, None), (False, y), (True, None)):
        hashed_dropout(x, 0.1, key.key, key.salt, relu, residual).sum().backward(retain_graph=True)
    for width in (64, 512, 1024):
        x, norm = torch.zeros(48, width, requires_grad=True), nn.LayerNorm(width)
        normed, same = norm_branch(x, norm.weight, norm.bias, norm.eps, dtype)
        (normed.sum() + same.sum()).backward()
        sum_over_tokens(normed)
    hidden, weight = torch.zeros(32, 64, requires_grad=True), torch.zeros(32_001, 64)
    labels = torch.zeros(32, dtype=torch.int64)
    fused_cross_entropy(hidden, weight, None, labels, 0.1, dtype, 32)
    fused_cross_entropy(hidden.detach(), weight, None, labels, 0.1, dtype, 32)
    for longest, width in product(TILES, (16, 24, 64, 128)):
        if not suits_short_attention(longest, width, dtype, divmod(capability, 10)):
            continue
        suitable += 1
        sequences = Packed(
            torch.tensor([0, 48], dtype=torch.int32), torch.arange(48, dtype=torch.int32), longest
        )
        projected = torch.zeros(48, 3 * 8 * width, dtype=dtype, requires_grad=True)
        short_attention(projected, None, 8, sequences, sequences, True, 0.1, key).sum().backward()
        queries, keys_values = projected[:, : 8 * width], projected[:, 8 * width :]
        short_attention(queries, keys_values, 8, sequences, sequences, False, 0.1, key).sum().backward()
    assert suitable == {75: 0, 86: 11}.get(capability, 12)


def decode(capability: int) -> None:
    """The kernels of a decoding step, with arguments of many sizes."""
    position, norm = torch.tensor([3]), nn.LayerNorm(1024)
    for dtype in (torch.float16 if capability < 80 else torch.bfloat16, torch.float32):
        x = torch.zeros(6, 1024)
        add_norm(x, x.to(dtype), norm, dtype, replace=False)
        add_norm(x, None, norm, dtype, replace=True)
        for width, beams in ((24, 1), (64, 5), (128, 64), (256, 1), (256, 64)):
            cache = torch.zeros(2, 2, 4, 8 * beams, width, dtype=dtype)
            rows = torch.zeros(2 * beams, 4 * width, dtype=dtype)
            past = torch.zeros(2, beams, 8 * beams, dtype=torch.uint8) if beams > 1 else None
            attention(torch.cat([rows] * 3, dim=1), cache, past, position, to_self=True)
            memory, spans = torch.zeros(6, 2, 4, width, dtype=dtype), torch.zeros(2, 2, dtype=torch.int64)
            attention(rows, memory, None, spans, to_self=False)
    zeros = torch.zeros(2, dtype=torch.int64)
    plain = Allowed(position, zeros, 3)
    ruled = Allowed(position, zeros, 3, torch.zeros(32_000, dtype=torch.bool), zeros[:, None])
    for vocabulary, beams, allowed in ((32_000, 5, ruled), (250_000, 1, plain), (8_003, 64, plain)):
        logits, tokens = torch.zeros(2 * beams, vocabulary), torch.zeros(2, beams, 8, dtype=torch.int64)
        best_continuations(logits, torch.zeros(2, beams), 2 * beams, *allowed)
        chosen, gained = best_tokens(logits, *allowed)
        state = tokens[:, :, 0], tokens, torch.zeros(2, beams), torch.ones(2, beams, dtype=torch.bool)
        append_tokens(gained, chosen, *state, zeros, position, 3)


if __name__ == "__main__":
    capability = int(sys.argv[1])
    for launch in [*recorded(train, capability), *recorded(decode, capability)]:
        shared = launch.shared_memory(capability)
        print(launch.kernel.fn.__name__, launch.keywords, shared, flush=True)
        assert shared <= SHARED_MEMORY[capability]
