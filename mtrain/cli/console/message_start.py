"""What messages on stderr begin with. Imports nothing, because `mtrain.cli` needs it before anything else."""

import os
import sys


def clear_bars() -> str:
    """What a last message begins with, so that it replaces progress bars that an error or a signal has left
    on a terminal, and what it shows for Ctrl-C."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return "\r\x1b[J" if is_terminal and os.environ.get("TERM") != "dumb" else ""


def rank_prefix() -> str:
    """What the messages of this rank begin with; nothing on rank 0."""
    rank = os.environ.get("RANK", "0") if is_one_of_several() else "0"
    return f"rank {rank}: " if rank != "0" else ""


def is_one_of_several() -> bool:
    """Whether torchrun has started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") != "1"
