"""Multi-head attention. Symbols in shapes: see `mtrain.model`."""

import torch
from torch import Tensor, nn

from mtrain.kernels import attention as kernels
from mtrain.kernels.precision import widest_float
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

    def project_memory(self, memory: Tensor) -> Tensor:
        """Keys and values (B, S, 2 * E) of the encoder output (B, S, E)."""
        return self.query_key_value.slice(memory, memory.size(-1))
