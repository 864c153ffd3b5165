"""Triton kernels of a decoding step: layer norm and attention.

`mtrain.kernels.decoding_step` describes arguments, results and symbols. Tensors are contiguous and on the
current device, but keys and values of targets may be of the first sentences in a larger tensor. Sums are in
fp32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

MIN_TILE = 16  # `tl.dot` requires as many rows and columns
MAX_ROWS = 32  # of a sentence, in one program
# Of keys, or of values, that a program reads at a time. On an H200, tiles of 4,096 bytes with one warp for
# 16 x 64 results took 0.36 to 0.61 of the time of 8,192 bytes with four warps, and as long with 8 programs.
TILE_BYTES = 4096
RESULTS_OF_WARP = 1024


@triton.jit
def add_norm_kernel(x, y, out, gain, bias, width, epsilon, REPLACE: tl.constexpr, COLUMNS: tl.constexpr):
    """A program for each row."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    place = tl.program_id(0).to(tl.int64) * width + columns
    added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        added += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, added - tl.sum(added, 0) / width, 0.0)
    normed = centered / tl.sqrt(tl.sum(centered * centered, 0) / width + epsilon)
    normed *= tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + place, normed if REPLACE else added, mask=inside)
    tl.store(out + place, normed, mask=inside)


def add_norm(x: Tensor, y: Tensor | None, norm: nn.LayerNorm, dtype: torch.dtype, replace: bool) -> Tensor:
    """See `mtrain.kernels.decoding_step.add_norm`."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=dtype)
    sizes = {"REPLACE": replace, "COLUMNS": triton.next_power_of_2(width), "num_warps": 4}
    add_norm_kernel[(rows,)](x, y, out, norm.weight, norm.bias, width, norm.eps, **sizes)
    return out


@triton.jit
def attention_kernel(
    projected, cache, past_keep, counts, out, heads, slots, values_offset, scale, SELF: tl.constexpr,
    BEAMS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program for ROWS beams of a sentence in one head: self-attention if SELF, otherwise attention to the
    source. `counts` is the position if SELF, otherwise the first key and the number of keys of each sentence.

    Padding is not read, nor are slots of this position, where programs store keys and values meanwhile.
    """
    # Heads come first: programs that run at the same time read neighboring keys of a source.
    sentence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    beams = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (beams < BEAMS)[:, None] & (columns < WIDTH)[None, :]
    rows = (sentence * BEAMS + beams)[:, None] * heads
    if SELF:
        keys, stride = cache + (sentence * heads + head) * slots * WIDTH, WIDTH
        values = keys + values_offset
        count = tl.load(counts).to(tl.int32) * BEAMS  # of slots of earlier positions
        new = projected + (3 * rows + head) * WIDTH + columns[None, :]
        queries = tl.load(new, mask=inside, other=0.0)
        new_keys = tl.load(new + heads * WIDTH, mask=inside, other=0.0)
        new_values = tl.load(new + 2 * heads * WIDTH, mask=inside, other=0.0)
        slot = (count + beams)[:, None] * WIDTH + columns[None, :]
        tl.store(keys + slot, new_keys, mask=inside)
        tl.store(values + slot, new_values, mask=inside)
        highest = tl.sum(queries.to(tl.float32) * new_keys.to(tl.float32), 1) * scale
        total = tl.full((ROWS,), 1.0, tl.float32)
        attended = new_values.to(tl.float32)
    else:
        stride = 2 * heads * WIDTH
        keys = cache + tl.load(counts + 2 * sentence) * stride + head * WIDTH
        values = keys + values_offset
        count = tl.load(counts + 2 * sentence + 1).to(tl.int32)
        queries = tl.load(projected + (rows + head) * WIDTH + columns[None, :], mask=inside, other=0.0)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        attended = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, TILE):
        index = start + tl.arange(0, TILE)
        stored = index < count
        place = index[:, None] * stride + columns[None, :]
        there = stored[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(keys + place, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
        seen = stored[None, :]
        if past_keep is not None:
            marks = past_keep + (sentence * BEAMS + beams)[:, None] * slots + index[None, :]
            seen = tl.load(marks, mask=seen & (beams < BEAMS)[:, None], other=0) != 0
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        factor = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * factor + tl.sum(weights, 1)
        tile = tl.load(values + place, mask=there, other=0.0)
        attended = attended * factor[:, None] + tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")
        highest = higher
    attended /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (rows + head) * WIDTH + columns[None, :], attended, mask=inside)


def attention(
    projected: Tensor, cache: Tensor, past_keep: Tensor | None, counts: Tensor, to_self: bool
) -> Tensor:
    """See `self_attention` and `cross_attention` of `mtrain.kernels.decoding_step`; `counts` is the position
    or the spans of the sources."""
    heads, width = cache.size(2), cache.size(-1)
    sentences, slots, values_offset = len(counts), 0, cache.stride(1)
    if to_self:
        sentences, slots, values_offset = cache.size(1), cache.size(3), cache.stride(0)
    out = projected.new_empty(len(projected), heads * width)
    beams, columns = len(projected) // sentences, max(MIN_TILE, triton.next_power_of_2(width))
    rows = min(MAX_ROWS, max(MIN_TILE, triton.next_power_of_2(beams)))
    tile = min(64, max(MIN_TILE, TILE_BYTES // (columns * cache.element_size())))  # keys
    warps = min(4, max(1, rows * columns // RESULTS_OF_WARP))
    sizes = {"BEAMS": beams, "ROWS": rows, "WIDTH": width, "COLUMNS": columns, "TILE": tile}
    attention_kernel[(sentences * heads, triton.cdiv(beams, rows))](
        projected, cache, past_keep, counts, out, heads, slots, values_offset, width**-0.5,
        SELF=to_self, **sizes, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out
