"""Muon for the weight matrices of layers, and AdamW for all other parameters."""

from concurrent.futures import Executor
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.distributed.shards import divided_like, own_part, whole
from mtrain.kernels.precision import cpu_has_bf16

MOMENTUM = 0.95
# The root mean square of an update, relative to the learning rate. Updates of AdamW are about as large, so
# both can use the same rate (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).
UPDATE_SIZE = 0.2
# Coefficients of the quintic polynomial of Jordan et al. (2024), and the number of iterations.
_COEFFICIENTS, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5
_MOST_NUMBERS = 2**26  # in matrices that are updated together, which limits the memory of copies


class Muon(torch.optim.AdamW):
    """AdamW, except that parameter groups with `uses_muon` are updated by Muon (Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks", 2024): each block of a matrix by a nearly orthogonal
    matrix near its momentum. So it changes by about the same amount in all directions, even in those in which
    its gradient is small.

    The state of a matrix is its momentum, as `exp_avg`, which checkpoints save; `state_dict` and `deepcopy`
    are not supported. `torch.optim.Muon` always computes in bf16, which is slow on most CPUs, synchronizes
    with the GPU if a step may be skipped, and treats the projections of queries, keys and values as one
    matrix.
    """

    def __init__(
        self, groups: list[dict[str, Any]], precision: str, workers: int, pool: Executor | None, **adamw: Any
    ):
        """`precision` of matrix products; `workers`: how many threads share the matrices, the calling one and
        those of `pool`; `adamw`: further options of AdamW."""
        super().__init__(groups, **adamw)
        self._workers, self._pool = workers, pool
        first = self.param_groups[0]["params"][0]
        # Ranks must compute identical updates, but the CPUs of some machines may lack bf16.
        is_fast = first.device.type == "cuda" or (cpu_has_bf16() and not dist.is_initialized())
        # The type in which matrices are orthogonalized.
        self._dtype = torch.bfloat16 if is_fast and precision == "bf16" else first.dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, unless `found_inf` is 1; see `step_unless`."""
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["uses_muon"]:
                self._update(group, skip)
        super().step()

    def _update(self, group: dict[str, Any], skip: Tensor | None) -> None:
        """Update the matrices of a group, and free their gradients, so that AdamW does not see them."""
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        numbers = zip(accumulate(parameter.numel() for parameter in trained), trained, strict=True)
        for _, some in groupby(numbers, key=lambda pair: pair[0] // _MOST_NUMBERS):
            self._update_some([parameter for _, parameter in some], group, skip)

    def _update_some(self, trained: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """Update some matrices of a group; those that are sharded are gathered."""
        updates = [self._next_update(parameter, skip) for parameter in trained]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for update in updates:
            blocks = _blocks(update)
            by_shape.setdefault(blocks.shape[1:], []).append(blocks)
        for same in by_shape.values():
            found = torch.split(self._orthogonalized(torch.cat(same)), [*map(len, same)])
            for blocks, orthogonal in zip(same, found, strict=True):
                blocks.copy_(orthogonal)
        rate = group["lr"] if skip is None else group["lr"] * (1 - skip)
        for parameter, update in zip(trained, updates, strict=True):
            own, of_update = own_part(parameter), own_part(divided_like(update, parameter))
            of_update.mul_(UPDATE_SIZE).add_(own, alpha=group["weight_decay"])
            own.sub_(of_update.mul_(rate))

    def _orthogonalized(self, matrices: Tensor) -> Tensor:
        """`orthogonalized`, by all workers."""
        if self._pool is None:
            return orthogonalized(matrices, self._dtype)
        first, *others = matrices.chunk(self._workers)
        jobs = [self._pool.submit(orthogonalized, x, self._dtype) for x in others]
        return torch.cat([orthogonalized(first, self._dtype), *(job.result() for job in jobs)])

    def _next_update(self, parameter: Tensor, skip: Tensor | None) -> Tensor:
        """The Nesterov momentum of a matrix, in the memory of its gradient, which the parameter loses."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum, own = own_part(state["exp_avg"]), own_part(gradient)
        if skip is not None:
            own.copy_(torch.where(skip > 0, momentum, own))  # so that the momentum does not change
        momentum.lerp_(own, 1 - MOMENTUM)
        own.lerp_(momentum, MOMENTUM)
        return whole(gradient)


def _blocks(matrix: Tensor) -> Tensor:
    """A matrix as square blocks (N, D, D), which share its memory; as (1, rows, columns) if it has no such
    blocks. So the projections of queries, keys and values are updated one by one, and other matrices that are
    not square in blocks, which is faster than as a whole."""
    rows, columns = matrix.shape
    if rows % columns == 0:
        return matrix.view(-1, columns, columns)
    if columns % rows == 0:
        return matrix.view(rows, -1, rows).transpose(0, 1)
    return matrix[None]


def orthogonalized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices with the singular vectors of x (N, rows, columns). Their singular values are 0.7 to 1.2 (less
    where those of x are very small), times the square root of the larger dimension, so that the root mean
    square of the elements is about 1. Newton-Schulz iterations in `dtype` (Jordan et al. 2024)."""
    size: float = max(x.shape[1:]) ** 0.5
    if x.size(1) > x.size(2):
        return orthogonalized(x.transpose(1, 2), dtype).transpose(1, 2)
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):  # x becomes a x + (b S + c S^2) x, where S is x x^T
        square = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x * size
