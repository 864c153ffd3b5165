"""The gradient of the bias of a linear map; see `mtrain.kernels.mixed_linear`.

Symbols in shapes: P tokens, F features, N parts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 32, 128  # of a tile: 8 KiB in 16 bits
_TOKENS, _PARTS = 128, 128  # of a part at least; at most so many parts, enough for any GPU with 512 features


def sum_over_tokens(x: Tensor) -> Tensor:
    """The sum of x (P, F) over its tokens, in fp32: (F)."""
    tokens, features = x.shape
    parts = max(1, min(_PARTS, tokens // _TOKENS))
    sums = torch.empty(parts, features, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(features, _COLUMNS), parts
    sum_kernel[grid](x, sums, tokens, features, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return sums.sum(0)


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(x, sums, tokens, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums (N, F) of N parts of the tokens of x (P, F): a part has every N-th tile."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(part, tl.cdiv(tokens, ROWS), parts):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & (column < features)[None, :]
        place = row.to(tl.int64)[:, None] * features + column[None, :]
        total += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + part * features + column, tl.sum(total, 0), mask=column < features)
