"""The blocks of the Transformer: dropout, residual connection, feed-forward, encoder and decoder layer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.model.attention import LayerCache, MultiHeadAttention
from mtrain.schema import ModelConfig


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014). On CPUs, where drawing the mask costs more than the layer around it,
    four elements share a 64-bit draw: rates are then exact to 1/65536."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.generator: torch.Generator | None = None  # of the CPU; None: PyTorch's own

    @staticmethod
    def seed(model: nn.Module, seed: int) -> None:
        """Let every dropout of a model draw from one generator of their own, which starts at `seed`."""
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        draws.random_(-(2**63), None, generator=self.generator)
        # What is kept grows by 1 / (1 - rate), as x can hold it; the rate follows, so that no bias is left.
        scale = torch.tensor(1 / (1 - self.rate), dtype=x.dtype).item()
        threshold = min(round((0.5 - 1 / scale) * 65536), 32767)
        keep = draws.view(torch.int16)[: x.numel()].view(x.shape) >= threshold
        return x * keep.to(x.dtype).mul_(scale)


class Residual(nn.Module):
    """Adds a sublayer's output to its input. Layer norm comes before the sublayer ("pre": Xiong et al., "On
    Layer Normalization in the Transformer Architecture", 2020) or after the addition ("post": Vaswani)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x + self.dropout(sublayer(self.norm(x)))  # type: ignore[no-any-return]
        return self.norm(x + self.dropout(sublayer(x)))  # type: ignore[no-any-return]


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between; for "swiglu" one half of the first gates the other
    (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = _ACTIVATIONS["silu" if self.gated else config.activation]
        self.inner = nn.Linear(config.d_model, config.ffn_dim * (2 if self.gated else 1))
        self.outer = nn.Linear(config.ffn_dim, config.d_model)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * hidden
        else:
            hidden = self.activation(hidden)
        return self.outer(self.dropout(hidden))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in a residual connection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = MultiHeadAttention(config.d_model, config.heads, config.positions == "rotary")
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.feed_forward_residual = Residual(config), Residual(config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, S, E), mask (B, 1, 1, S)."""
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, mask))
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention over the encoder's output, then feed-forward."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = MultiHeadAttention(config.d_model, config.heads, config.positions == "rotary")
        self.cross_attention = MultiHeadAttention(config.d_model, config.heads)
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.cross_attention_residual = Residual(config), Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: Tensor,
        cache: LayerCache | None = None,
        cached: int = 0,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """x (N, T, E), memory (B, S, E) or none if a cache holds its projection, mask (B, 1, 1, S)."""
        if cache is not None:
            keys, values = cache.cross_keys, cache.cross_values
        else:
            assert memory is not None
            keys, values = self.cross_attention.project_memory(memory)
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, causal=True, cache=cache, cached=cached)
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.over_memory(y, keys, values, mask, weights)
        )
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]
