"""Which sentences the kernel of `attention` takes, without importing Triton."""

import torch

TILES = (32, 64, 128)  # tokens


def suits_short_attention(
    longest: int, head_width: int, dtype: torch.dtype, capability: tuple[int, int]
) -> bool:
    """Whether `attention.short_attention` is the kernel for sentences of at most `longest` tokens on a GPU of
    a compute capability.

    Only in 16 bits from 8.0 on, where Triton uses tensor cores. Otherwise it unrolls the products, which is
    slow, and takes minutes to compile. Tiles have to fit in shared memory.
    """
    if dtype not in (torch.float16, torch.bfloat16) or capability < (8, 0) or longest > max(TILES):
        return False
    if torch.version.hip:
        limit = 65_536
    elif capability in ((8, 0), (8, 7)):
        limit = 166_912
    else:
        limit = 232_448 if 9 <= capability[0] < 12 else 101_376
    tile = tile_of(longest)
    return 2 * tile * (tile + 4 * lanes_of(head_width)) <= limit  # bytes: a bound of what the compiler takes


def tile_of(longest: int) -> int:
    """The tokens of a tile that holds sentences of at most `longest` tokens."""
    return min(tile for tile in TILES if tile >= longest)


def lanes_of(head_width: int) -> int:
    """The width of a tile: a power of two, and at least 16 for `tl.dot`."""
    return max(16, 1 << (head_width - 1).bit_length())
