"""Kernels of attention that read packed sequences.

Symbols in shapes: P tokens of the queries, D head width, E model width; see `mtrain.kernels.attention`.
"""

import torch
from torch import Tensor

from mtrain.kernels.attention.eager import split_heads
from mtrain.kernels.dropout import Generator, HashKey
from mtrain.kernels.sequences import Packed
from mtrain.kernels.triton.available import attempt, suits_kernels
from mtrain.kernels.triton.tiles import suits_short_attention
from mtrain.kernels.undocumented import undocumented

_FLASH_HEAD_WIDTH = 192  # wider heads have no backward pass with dropout on some devices


def packed_attention(
    projected: Tensor,
    keys_values: Tensor | None,
    heads: int,
    queries: Packed,
    keys: Packed,
    causal: bool,
    rate: float,
    generator: Generator,
) -> Tensor | None:
    """Attention (P, E) by a kernel for packed sequences, or None if none suits the device and the type.

    Arguments are as of `attention` in `dispatch`; queries and keys have equally many sequences.
    The kernel is
        short  for short sentences, where Triton works: see `suits_short_attention`
        flash  otherwise (Dao, "FlashAttention-2", 2023), which draws dropout from PyTorch's generator of the
               device
    """
    device, dtype = projected.device, projected.dtype
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    width = projected.size(-1) // ((3 if keys_values is None else 1) * heads)
    capability = torch.cuda.get_device_capability(device)
    longest = max(queries.longest, keys.longest)
    has_mask = not rate or isinstance(generator, HashKey)
    if has_mask and suits_kernels(projected) and suits_short_attention(longest, width, dtype, capability):
        sizes = dtype, heads, width, (longest - 1).bit_length(), causal, rate > 0, keys_values is None
        inputs = projected, keys_values, heads, queries, keys, causal, rate, generator
        attended: Tensor | None = attempt("attention.short_attention", sizes, *inputs)
        if attended is not None:
            return attended
    # PyTorch's operator for packed sequences, which has a gradient. The documented function that calls it,
    # `torch.nn.attention.varlen.varlen_attn`, has no dropout.
    flash = undocumented("ops.aten._flash_attention_forward")
    if flash is None or not _suits_flash(width, capability):
        return None
    rows = projected[None], None if keys_values is None else keys_values[None]
    q, k, v = (part[0] for part in split_heads(*rows, heads))  # (P, H, D)
    starts, lengths = (queries.starts, keys.starts), (queries.longest, keys.longest)
    out: Tensor = flash(q, k, v, *starts, *lengths, rate, causal, False)[0]
    return out.flatten(1)


def _suits_flash(head_width: int, capability: tuple[int, int]) -> bool:
    fits = head_width % 8 == 0 and head_width <= _FLASH_HEAD_WIDTH and capability >= (8, 0)
    return fits and torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
