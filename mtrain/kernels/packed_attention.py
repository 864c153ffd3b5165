"""Kernels of attention that read packed sequences.

Symbols in shapes: P tokens of the queries, E model width; see `mtrain.kernels.attention`.
"""

from typing import Any

import torch
from torch import Tensor

from mtrain.kernels.eager_attention import split_heads
from mtrain.kernels.sequences import Packed
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
) -> Tensor | None:
    """Attention (P, E) by a kernel for packed sequences, or None if none suits the device and the type.

    Arguments are as of `mtrain.kernels.attention.attention`; queries and keys have equally many sequences.
    FlashAttention (Dao, "FlashAttention-2", 2023) draws dropout from PyTorch's generator of the device.
    """
    flash = _flash_kernel(projected, keys_values, heads)
    if flash is None:
        return None
    q, k, v = (part[0] for part in split_heads(projected[None], _one_row(keys_values), heads))  # (P, H, D)
    longest = queries.longest, keys.longest
    out: Tensor = flash(q, k, v, queries.starts, keys.starts, *longest, rate, causal, False)[0]
    return out.flatten(1)


def _one_row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[None]


def _flash_kernel(projected: Tensor, keys_values: Tensor | None, heads: int) -> Any:
    """PyTorch's operator for packed sequences, which has a gradient. (The documented
    `torch.nn.attention.varlen.varlen_attn` calls it without dropout.) None if it cannot be used."""
    device, dtype = projected.device, projected.dtype
    width = projected.size(-1) // ((3 if keys_values is None else 1) * heads)
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or torch.version.hip:
        return None
    if width % 8 or width > _FLASH_HEAD_WIDTH or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    return undocumented("ops.aten._flash_attention_forward")
