"""Operations on many tensors at a time."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from mtrain.kernels.undocumented import undocumented


def change_all(
    operation: Literal["add", "mul"], tensors: Sequence[Tensor], others: Tensor | Sequence[Tensor]
) -> None:
    """Add others to tensors in place, or multiply tensors by them: each by its own, or all by one tensor.
    It takes a few kernels where PyTorch has an operation for it."""
    foreach = undocumented(f"_foreach_{operation}_")
    if foreach is not None and tensors:
        foreach(tensors, others)
        return
    own = [others] * len(tensors) if isinstance(others, Tensor) else others
    for tensor, other in zip(tensors, own, strict=True):
        getattr(tensor, f"{operation}_")(other)
