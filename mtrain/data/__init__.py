"""Parallel text: from files to batches."""

from typing import NamedTuple


class Pair(NamedTuple):
    """One sentence and its translation, as raw text."""

    source: str
    target: str
