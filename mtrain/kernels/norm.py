"""Layer norm (Ba et al. 2016) in front of a branch that returns to its input, as in a residual connection."""

import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.kernels.precision import product_dtype
from mtrain.kernels.triton.available import attempt


class BranchNorm(nn.LayerNorm):
    """The layer norm of x (P, E), which is only used in products, and x itself, for everything else.

    Where Triton works, one kernel adds up the gradients of both, and the norm has the type of autocast, to
    which products would round it. Otherwise, these are the operators.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        dtype = product_dtype(x)
        inputs = x, self.weight, self.bias, self.eps, dtype
        sizes = x.dtype, dtype, x.size(-1)
        both: tuple[Tensor, Tensor] | None = attempt("norm.norm_branch", sizes, *inputs)
        if both is not None:
            return both
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps), x
