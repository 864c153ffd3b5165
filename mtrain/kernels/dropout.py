"""Dropout (Srivastava et al. 2014) with masks that are cheap to make.

`rate` is the probability that an element is zeroed; the others are scaled by 1 / (1 - rate). A `generator` is
    a HashKey          the mask is a hash, so the backward pass of the Triton kernel computes it again, and a
                       CUDA graph needs no random state;
    torch.Generator    on a CPU, the mask is drawn from it (None: from PyTorch's default generator). Other
                       devices use `torch.nn.functional.dropout` and ignore it.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.kernels.hashing import kept
from mtrain.kernels.triton.available import attempt


class HashKey(NamedTuple):
    """What a mask is hashed from, besides the index of each element.

    The salt is a tensor, too: Triton would compile a kernel once more for a number that is 1 or a multiple
    of 16.
    """

    key: Tensor  # (1,) int32, on the device of the elements; changes from micro-batch to micro-batch
    salt: Tensor  # (1,) int32: a different one for each place in the model that drops elements
    places: Tensor | None = None  # int32: the index of each element; by default, that in its tensor

    def of_weights(self, tokens: Tensor, heads: int, keys: int) -> Self:
        """For attention weights (N, H, T, S), where S is `keys`.

        tokens (N, T) are the indices of the queries among all tokens of the batch. With up to 128 keys, the
        mask depends only on the query's token, the head and the position of the key in its sequence, not on
        padding: the kernel for packed sequences computes the same.
        """
        head = torch.arange(heads, dtype=torch.int32, device=tokens.device)[:, None, None]  # (H, 1, 1)
        rows = tokens.int()[:, None, :, None] * heads + head  # (N, H, T, 1)
        key = torch.arange(keys, dtype=torch.int32, device=tokens.device)
        return self._replace(places=rows * max(keys, 128) + key)


Generator = torch.Generator | HashKey | None


def dropout(
    x: Tensor, rate: float, generator: Generator = None, *, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """Dropout of x, or with `relu` of relu(x), plus the residual if given. At rate 0, nothing is drawn.

    On a CPU, dropout and sum are one pass over memory, in the type of the residual. The backward pass of
    dropout(relu(x)) needs nothing but its result: where that is 0, the gradient is 0.
    """
    if rate and isinstance(generator, HashKey):
        return _hashed_dropout(x, rate, generator, relu, residual)
    if rate and x.device.type == "cpu":
        assert not isinstance(generator, HashKey)
        if not relu and residual is not None:
            return torch.addcmul(residual, x.to(residual.dtype), _mask(residual, rate, generator))
        x = _ReluDropout.apply(x, rate, generator) if relu else x * _mask(x, rate, generator)  # type: ignore[no-untyped-call]
    else:
        x = F.relu(x) if relu else x
        x = F.dropout(x, rate) if rate else x
    return x if residual is None else residual + x


def _hashed_dropout(x: Tensor, rate: float, hash_key: HashKey, relu: bool, residual: Tensor | None) -> Tensor:
    if relu and residual is not None:
        return residual + _hashed_dropout(x, rate, hash_key, relu, None)
    key, salt, places = hash_key
    if places is None:
        sizes, inputs = (x.dtype, residual is None, relu), (x, rate, key, salt, relu, residual)
        dropped: Tensor | None = attempt("dropout.hashed_dropout", sizes, *inputs)
        if dropped is not None:
            return dropped
        places = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    x = x if residual is None else x.to(residual.dtype)
    out = torch.where(kept(places, key, salt, rate), x * (1 / (1 - rate)), 0)
    if relu:  # last, because its backward pass needs nothing but the result
        return F.relu(out)
    return out if residual is None else residual + out


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
        out = x.clamp_min(0).mul_(_mask(x, rate, generator))
        ctx.save_for_backward(out)
        ctx.scale = _scale(rate, x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return out.sign().mul_(ctx.scale).mul_(grad), None, None


def _mask(x: Tensor, rate: float, generator: torch.Generator | None) -> Tensor:
    """A factor for each element of x: 0 or the scale.

    Drawing one number per element takes longer than the layer around it, so four elements share a 64-bit
    draw, and the rate is exact to 1/65536.
    """
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
    draws.random_(-(2**63), None, generator=generator)
    # The rate is derived from the rounded scale, so that the mean is unbiased.
    scale = _scale(rate, x.dtype)
    threshold = min(round((0.5 - 1 / scale) * 65536), 32767)
    draws = draws.view(torch.int16)[: x.numel()].view(x.shape)
    keep = torch.ge(draws, threshold, out=x.new_empty(x.shape))  # a bool mask would take seven times as long
    return keep.mul_(scale)


def _scale(rate: float, dtype: torch.dtype) -> float:
    """1 / (1 - rate), rounded to a type."""
    return torch.tensor(1 / (1 - rate), dtype=dtype).item()
