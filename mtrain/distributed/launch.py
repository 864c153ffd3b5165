"""How this process was started: alone, or by torchrun as one of several processes of a command ("ranks")."""

import os
from typing import NamedTuple

from mtrain.errors import UsageError


class Launch(NamedTuple):
    """The place of this process among the ranks of its command."""

    rank: int = 0
    size: int = 1  # number of ranks
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 1
    restarts: int = 0  # how often torchrun has started the ranks again after a failure


def read_launch() -> Launch:
    """Read the environment variables that torchrun sets. Without them, this process is the only rank.

    Raises UsageError if one of them is not an integer.
    """
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    optional = {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    values = {**optional, **os.environ}
    if not values.keys() >= set(required):
        return Launch()
    numbers = []
    for name in (*required, *optional):
        if not values[name].isdecimal():
            raise UsageError(f"{name}: {values[name]!r} in the environment is not a number; use torchrun")
        numbers.append(int(values[name]))
    return Launch(*numbers)
