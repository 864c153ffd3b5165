"""Parallel text: from files to batches."""

from typing import Any, NamedTuple

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}  # by file suffix: the compression of text files


class Pair(NamedTuple):
    """One sentence and its translation, as raw text."""

    source: str
    target: str


def are_too_long(source: Any, target: Any, max_length: int) -> Any:
    """Whether pairs with so many ids, EOS and language tags included, are longer than `data.max_length` on
    either side: a bool for two ints, an array for two arrays. `mtrain.data.preparing.encode_shards` drops
    such pairs, and `mtrain.data.rewriting` makes none."""
    return (source > max_length) | (target > max_length)
