"""Layer norm (Ba et al. 2016) in front of a branch that returns to its input, as in a residual connection."""

from torch import Tensor, nn

from mtrain.kernels.precision import product_dtype
from mtrain.kernels.triton.available import attempt


def norm_branch(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The layer norm of x (P, E), which is only used in products, and x itself, for everything else.

    Where Triton works, one kernel adds up the gradients of both, and the norm has the type of autocast, to
    which products would round it. Otherwise, these are the operators.
    """
    dtype = product_dtype(x)
    inputs = x, norm.weight, norm.bias, norm.eps, dtype
    both: tuple[Tensor, Tensor] | None = attempt("norm.norm_branch", (x.dtype, dtype, x.size(-1)), *inputs)
    return (norm(x), x) if both is None else both
