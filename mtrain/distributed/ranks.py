"""What the ranks of a command agree on, in the trivial form for a process without others.

All ranks run the same code and make the same calls of `Ranks`, in the same order. What a branch depends on is
agreed on first, so that no rank waits for a call that another one never makes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtrain.device import make_current
from mtrain.errors import is_recoverable

JsonValue = Any  # numbers, strings, lists, dictionaries with strings as keys, None


class Ranks:
    """A process without others. `ManyRanks` is one of several."""

    rank, size = 0, 1
    local_size = 1  # ranks on this machine
    step_group: Any = None  # process group that adds up gradients; None: PyTorch's default group

    def __init__(self, device: torch.device):
        """`device` is what this rank computes on, and becomes the current device of the process."""
        self.device = device
        make_current(device)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.rank == 0

    def require_equal(self, facts: Mapping[str, str]) -> None:
        """Raise DistributedError if a fact differs between ranks, naming the rank and the fact."""

    def barrier(self) -> None:
        """Wait until all ranks are here, for as long as rank 0 may take to save or validate."""

    def expect_steps(self) -> None:
        """Notice sooner that a rank does not respond. The first step, which may take long, is done."""

    def all_reduce_max(self, *values: float) -> list[float]:
        """The maximum over all ranks of each value."""
        return list(values)

    def start_all_reduce(self, values: Tensor) -> Callable[[], None]:
        """Start adding up `values` over all ranks, in place. The returned function completes it."""
        return lambda: None

    def broadcast(self, value: JsonValue, preparing: bool = False) -> JsonValue:
        """The value that rank 0 gives. The others wait for it; longer if rank 0 is `preparing` the data."""
        return value

    def gather(self, value: JsonValue) -> list[JsonValue]:
        """The values of all ranks, in the order of the ranks."""
        return [value]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A context manager that raises an error of one rank on all ranks, at the end of the block, if it
        `is_recoverable`. Another error ends its rank, which the others then miss. The block must not
        communicate with other ranks."""
        yield

    def is_agreed(self, error: Exception) -> bool:
        """Whether all ranks have this error, because `agreed` has raised it. Only then can they continue
        together after it."""
        return is_recoverable(error)

    def seed_step(self, seed: int, step: int) -> None:
        """Seed the random generators for a step, if there are several ranks. A checkpoint then need not have
        the states of each rank."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context manager that turns failures of the connection to other ranks into LostRankError."""
        yield
