"""Multi-head attention. Symbols in shapes: see `mtrain.model`."""

import torch
from torch import Tensor, nn

from mtrain.kernels import attention as kernels
from mtrain.kernels.precision import widest_float
from mtrain.model.cache import LayerCache
from mtrain.model.layers import Dropout, Linear


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary position embeddings (Su et al., "RoFormer", 2021) to queries or keys x (.., D) at
    `positions`, which broadcast to (..). The two halves of D are the coordinates that are rotated."""
    half = x.size(-1) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=widest_float(x.device)) / half)
    angles = positions[..., None] * frequencies  # (.., D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention in `heads` parallel heads (Vaswani et al. 2017, section 3.2).

    One matrix projects queries, keys and values. Self-attention uses it as a whole. Cross-attention uses two
    slices: one for queries, one for keys and values. The K rows of a sentence become K times as many queries
    of that sentence, so its encoder output is never copied.
    """

    def __init__(self, d_model: int, heads: int, rotary: bool = False, dropout: float = 0.0):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.query_key_value = Linear(d_model, 3 * d_model)  # output: queries, keys, values, each by heads
        self.output = Linear(d_model, d_model)
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(
        self, x: Tensor, keys_values: Tensor | None = None, keep: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Self-attention (N, T, E) of x (N, T, E); with `keys_values` (B, S, 2 * E), which `project_memory`
        returns, attention to the encoder output.

        `keep` broadcasts to (N, H, T, T) or (B, H, T, S). With `causal`, each position attends to itself and
        those before it.
        """
        if keys_values is None:
            projected = self.query_key_value(x)
        else:
            projected = self.query_key_value.slice(x, 0, x.size(-1))
        if self.rotary:
            projected = self._rotated(projected)
        dropout = self.dropout
        attended = kernels.attention(
            projected, keys_values, self.heads, keep, causal, dropout.active_rate, dropout.generator
        )
        return self.output(attended)  # type: ignore[no-any-return]

    def _rotated(self, projected: Tensor) -> Tensor:
        """The queries, keys and values (N, T, 3 * E) with rotated queries and keys."""
        width = self.output.in_features
        rows, length, _ = projected.shape
        by_head = projected[..., : 2 * width].reshape(rows, length, 2 * self.heads, -1)  # queries, then keys
        positions = torch.arange(length, device=projected.device)[:, None]
        return torch.cat([rotate(by_head, positions).flatten(2), projected[..., 2 * width :]], dim=-1)

    def step(self, x: Tensor, cache: LayerCache, position: int, past_keep_bias: Tensor | None) -> Tensor:
        """Causal self-attention (N, E) of x (N, E) at one position, given the cache of those before it.

        Appends keys and values of x to the cache. For `past_keep_bias` see `KeyValueCache.extend`.
        """
        projected = self._split_heads(self.query_key_value.forward(x), 3, cache.sentences)
        queries, keys_values = projected[0], projected[1:]  # (B, H, K, D), (2, B, H, K, D)
        if self.rotary:
            queries, new_keys = rotate(projected[:2], torch.full((), position, device=x.device))
            keys_values = torch.stack([new_keys, projected[2]])
        keys, values = cache.append(keys_values)
        attended, _ = kernels.cached_attention(queries, keys, values, past_keep_bias)
        return self._merge_heads(attended, queries)

    def step_over_memory(self, x: Tensor, cache: LayerCache, source_keep_bias: Tensor | None) -> Tensor:
        """Attention (N, E) of x (N, E), one position of each row, to the encoder output in the cache. Its
        weights (N, H, 1, S) may be recorded."""
        queries = self.query_key_value.slice(x, 0, x.size(-1))
        queries = self._split_heads(queries, 1, cache.sentences)[0]
        keys, values = cache.memory_keys, cache.memory_values
        attended, weights = kernels.cached_attention(queries, keys, values, source_keep_bias)
        if (maps := kernels.recorder(cross=True)) is not None:
            weights = weights[:, :, : cache.source_length].reshape(*queries.shape[:-1], -1)  # (B, H, K, S)
            maps.append(kernels.by_row(weights, len(x)))
        return self._merge_heads(attended, queries)

    def project_memory(self, memory: Tensor) -> Tensor:
        """Keys and values (B, S, 2 * E) of the encoder output (B, S, E)."""
        return self.query_key_value.slice(memory, memory.size(-1))

    def keys_and_values(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each (B, H, S, D), from `project_memory` (B, S, 2 * E)."""
        keys, values = self._split_heads(keys_values, 2).unbind()
        return keys, values

    def _split_heads(self, x: Tensor, parts: int, sentences: int | None = None) -> Tensor:
        """The parts of x (.., parts * E) by heads, (parts, B, H, K*T, D). B is the length of x by default."""
        width = x.size(-1) // (parts * self.heads)
        by_head = x.view(len(x) if sentences is None else sentences, -1, parts, self.heads, width)
        return by_head.permute(2, 0, 3, 1, 4)

    def _merge_heads(self, attended: Tensor, queries: Tensor) -> Tensor:
        """The output (N, E) of attention (B*H, K, D) for queries (B, H, K, D)."""
        if queries.size(2) > 1:
            attended = attended.view(queries.shape).transpose(1, 2)  # (B, K, H, D)
        return self.output.forward(attended.reshape(-1, self.output.in_features))
