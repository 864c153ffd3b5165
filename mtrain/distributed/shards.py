"""Tensors of which each rank has a part ("shard"), as FSDP divides them. Plain tensors are left as they are.

These functions are calls of all ranks together if the tensors have shards. PyTorch's `DTensor`, which takes a
second to import, is recognized by its attributes.
"""

from torch import Tensor


def has_shards(tensor: Tensor) -> bool:
    """Whether each rank has only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor with the parts of all ranks."""
    return tensor.full_tensor() if has_shards(tensor) else tensor  # type: ignore[attr-defined]


def own_part(tensor: Tensor) -> Tensor:
    """The part of this rank, which shares memory with the tensor."""
    return tensor.to_local() if has_shards(tensor) else tensor  # type: ignore[attr-defined]


def divided_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, on the device of another one and with the same shards. Rank 0's values count."""
    moved = tensor.to(other.device)
    if not has_shards(other):
        return moved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(moved, other.device_mesh, other.placements)  # type: ignore[attr-defined]
