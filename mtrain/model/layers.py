"""The components of every layer: linear map, dropout, residual connection, feed-forward network.

Symbols in shapes: see `mtrain.model`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.model import ModelConfig
from mtrain.kernels.dropout import add_dropout, dropout, relu_dropout


class Linear(nn.Linear):
    """`nn.Linear` of which parts can be computed."""

    def slice(self, x: Tensor, start: int, end: int | None = None) -> Tensor:
        """The output features from `start` to `end` only."""
        return F.linear(x, self.weight[start:end], self.bias[start:end])


class Dropout(nn.Module):
    """Dropout with a generator that can be seeded separately for each training thread."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.generator: torch.Generator | None = None  # on the CPU; None: PyTorch's default generator

    @staticmethod
    def seed(model: nn.Module, seed: int) -> None:
        """Make all dropout modules of a model draw from one new generator with the given seed."""
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    @property
    def active(self) -> bool:
        """Whether dropout is applied: in training mode, if the rate is above 0."""
        return self.training and self.rate > 0

    @property
    def active_rate(self) -> float:
        """The rate in training mode, otherwise 0."""
        return self.rate if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate, self.generator) if self.active else x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + dropout(y)."""
        return add_dropout(x, y, self.rate, self.generator) if self.active else x + y

    def of_relu(self, x: Tensor) -> Tensor:
        """dropout(relu(x))."""
        return relu_dropout(x, self.rate, self.generator) if self.active else F.relu(x)


class Residual(nn.Module):
    """A residual connection around a sublayer: `x = residual.after(x, sublayer(residual.before(x)))`.

    Layer norm comes before the sublayer ("pre": Xiong et al., "On Layer Normalization in the Transformer
    Architecture", 2020) or after the addition ("post": Vaswani et al. 2017).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def before(self, x: Tensor) -> Tensor:
        """The input of the sublayer."""
        return self.norm(x) if self.pre else x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of x and the output y of the sublayer."""
        added = self.dropout.add(x, y)
        return added if self.pre else self.norm(added)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between them. With "swiglu", one half of the first map's output
    gates the other (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = _ACTIVATIONS["silu" if self.gated else config.activation]
        self.inner = Linear(config.d_model, config.ffn_dim * (2 if self.gated else 1))
        self.outer = Linear(config.ffn_dim, config.d_model)
        rate = config.activation_dropout
        self.dropout = Dropout(config.dropout if rate is None else rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.activate(self.inner(x)))  # type: ignore[no-any-return]

    def activate(self, x: Tensor) -> Tensor:
        """The non-linearity of the output of the first map, and dropout."""
        if self.activation is F.relu:
            return self.dropout.of_relu(x)
        if not self.gated:
            return self.dropout(self.activation(x))  # type: ignore[no-any-return]
        gate, x = x.chunk(2, dim=-1)
        return self.dropout(self.activation(gate) * x)  # type: ignore[no-any-return]
