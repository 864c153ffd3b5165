"""Parallel text: from files to batches."""

from typing import NamedTuple

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}  # by file suffix: the compression of text files


class Pair(NamedTuple):
    """One sentence and its translation, as raw text."""

    source: str
    target: str
