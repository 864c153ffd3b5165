"""Operations on many tensors at a time, by a few kernels where PyTorch has an operation for it."""

from collections.abc import Sequence

from torch import Tensor

from mtrain.kernels.undocumented import undocumented


def add_all(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each tensor its own other one, in place."""
    foreach = undocumented("_foreach_add_")
    if foreach is not None and tensors:
        foreach(tensors, others)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other)


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a scalar, in place."""
    foreach = undocumented("_foreach_mul_")
    if foreach is not None and tensors:
        foreach(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)
