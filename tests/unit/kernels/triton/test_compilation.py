"""All kernels compile for the GPUs that they are used on. No GPU is needed."""

import os
import subprocess
import sys
from typing import Any

import pytest

SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 90: 232_448}  # bytes of a program
FLOATS = {"dropout_scale", "scale"}


def compiled(kernel: Any, capability: int, dtype: str, constants: dict[str, Any], warps: int) -> int:
    """Compile a kernel whose other arguments are pointers or numbers; returns its bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    integers = {"labels", "starts", "memory_starts", "key", "salt"}
    types = dict.fromkeys(kernel.arg_names, f"*{dtype}")
    types |= {name: "*fp32" for name in ("nll", "uniform") if name in types}
    types |= {name: "*i32" for name in integers if name in types}
    types |= {name: "fp32" for name in FLOATS if name in types}
    types |= {name: "i32" for name in ("tokens", "memory_tokens", "limit", "size") if name in types}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(types) if types[name] == f"*{dtype}"]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": 1}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(result.metadata.shared)


def compile_all(capability: int) -> None:
    """Compile every kernel, and check how much shared memory it needs."""
    import torch

    from mtrain.kernels.triton.attention import attention_kernel
    from mtrain.kernels.triton.cross_entropy import cross_entropy_kernel
    from mtrain.kernels.triton.dropout import dropout_kernel
    from mtrain.kernels.triton.tiles import suits_short_attention

    dtype, limit = "bf16" if capability >= 80 else "fp16", SHARED_MEMORY[capability]
    for constants in (
        {"RELU": True, "other": None},
        {"RELU": False},
        {"RELU": False, "key": None, "salt": None},
    ):
        compiled(dropout_kernel, capability, dtype, {"BLOCK": 1024} | constants, 4)
    loss = {"IGNORE": -100, "SMOOTHING": 0.1, "VOCABULARY": 32_001, "BLOCK": 8192}
    for constants in ({}, {"scale": None}):
        assert compiled(cross_entropy_kernel, capability, dtype, loss | constants, 8) <= limit
    suitable = 0
    for tile, warps in ((32, 2), (64, 4), (128, 8)):
        for width in (16, 24, 64, 128):
            arguments = tile, width, torch.bfloat16 if capability >= 80 else torch.float16
            if not suits_short_attention(*arguments, divmod(capability, 10)):
                continue
            suitable += 1
            lanes = max(16, 1 << (width - 1).bit_length())
            constants = {
                "HEADS": 8,
                "WIDTH": width,
                "LANES": lanes,
                "TILE": tile,
                "SELF": True,
                "CAUSAL": True,
            }
            for grad in ({"grad": None}, {}):
                shared = compiled(attention_kernel, capability, dtype, constants | grad, warps)
                assert shared <= limit, (capability, tile, width, shared)
    assert suitable == {75: 0, 86: 11}.get(capability, 12)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_and_fits_in_shared_memory(capability: int) -> None:
    # In a process of its own, because this one has imported the kernels for the interpreter.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, str(capability)]
    subprocess.run(command, check=True, env=environment, timeout=1800)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
