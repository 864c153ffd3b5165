"""Layer norm (Ba et al. 2016) in front of a branch that returns to its input, as in a residual connection."""

import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.kernels.precision import product_dtype
from mtrain.kernels.triton.available import attempt, suits_kernels


class BranchNorm(nn.LayerNorm):
    """Returns the layer norm of x (P, E), for the products of a branch, and x itself, for what bypasses the
    branch. The second output is a view of x if kernels are used.

    Where Triton works, one kernel computes the backward pass and adds the gradients of the two outputs, and
    the first output has the type of autocast, to which matrix products would round it anyway. Elsewhere,
    PyTorch's layer norm is used.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if suits_kernels(x):  # first: on a CPU, decoding normalizes few rows at a time
            dtype = product_dtype(x)
            inputs = x, self.weight, self.bias, self.eps, dtype
            sizes = x.dtype, dtype, x.size(-1)
            both: tuple[Tensor, Tensor] | None = attempt("norm.norm_branch", sizes, *inputs)
            if both is not None:
                return both
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps), x
