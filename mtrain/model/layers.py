"""The blocks of the Transformer: residual connection, feed-forward, encoder and decoder layer."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.schema import ModelConfig
from mtrain.model.attention import MultiHeadAttention
from mtrain.model.cache import LayerCache
from mtrain.model.dropout import Dropout
from mtrain.model.linear import Linear


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

    def before(self, x: Tensor) -> Tensor:
        """What the sublayer takes of the input x. With `after` this is `forward`, but without dropout, in the
        halves that decoding takes one position through."""
        return self.norm.forward(x) if self.pre else x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """What becomes of the input x and the sublayer's output y."""
        return x + y if self.pre else self.norm.forward(x + y)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between; for "swiglu" one half of the first gates the other
    (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = _ACTIVATIONS["silu" if self.gated else config.activation]
        self.inner = Linear(config.d_model, config.ffn_dim * (2 if self.gated else 1))
        self.outer = Linear(config.ffn_dim, config.d_model)
        rate = config.activation_dropout
        self.dropout = Dropout(config.dropout if rate is None else rate)

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.inner.low, self.outer.low
        if inner is None or outer is None or not inner.is_worth(x):
            return self.outer(self._activated(self.inner(x)))  # type: ignore[no-any-return]
        return outer(self._activated(inner(x))).to(x.dtype)  # what is between stays in few bits

    def _activated(self, hidden: Tensor) -> Tensor:
        """What the first map gave, as the second takes it."""
        if not self.gated:
            return self.dropout(self.activation(hidden))  # type: ignore[no-any-return]
        gate, hidden = hidden.chunk(2, dim=-1)
        return self.dropout(self.activation(gate) * hidden)  # type: ignore[no-any-return]


def _attention(config: ModelConfig, rotary: bool = False) -> MultiHeadAttention:
    return MultiHeadAttention(config.d_model, config.heads, rotary, config.attention_dropout)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in a residual connection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = _attention(config, config.positions == "rotary")
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
        self.self_attention = _attention(config, config.positions == "rotary")
        self.cross_attention = _attention(config)
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.cross_attention_residual = Residual(config), Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, weights: list[Tensor] | None = None) -> Tensor:
        """x (N, T, E), memory (B, S, E), mask (B, 1, 1, S); for `weights` see `over_memory`."""
        keys, values = self.cross_attention.project_memory(memory)
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, causal=True))
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.over_memory(y, keys, values, mask, weights)
        )
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]

    def continued(
        self,
        x: Tensor,
        cache: LayerCache,
        at: int,
        past: Tensor | None,
        hidden: Tensor | None,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """As `forward`, for x (N, E) at position `at`, with a cache of what comes before; `past` and `hidden`
        are what hides some of that and of the memory (see `KeyValueCache`)."""
        residual = self.self_attention_residual
        x = residual.after(x, self.self_attention.continued(residual.before(x), cache, at, past))
        residual = self.cross_attention_residual
        x = residual.after(x, self.cross_attention.over_cache(residual.before(x), cache, hidden, weights))
        residual = self.feed_forward_residual
        return residual.after(x, self.feed_forward.forward(residual.before(x)))
