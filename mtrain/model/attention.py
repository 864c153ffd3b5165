"""Multi-head attention, its cache for decoding, and the masks. Letters in shapes: see `mtrain.model`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.model.dropout import Dropout


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(length, length) bool: position i may look at positions 0 to i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class LayerCache:
    """Keys and values of one decoder layer: its own past, and the memory's, projected once."""

    def __init__(self, cross_keys: Tensor, cross_values: Tensor, rows: int, max_length: int):
        _, heads, _, width = cross_keys.shape
        self.cross_keys, self.cross_values = cross_keys, cross_values  # (B, H, S, D): beams share them
        self.keys = cross_keys.new_empty(rows, heads, max_length, width)  # (N, H, max_length, D)
        self.values = torch.empty_like(self.keys)

    def append(self, keys: Tensor, values: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Store (N, H, T, D) from position `at` on; returns all keys and values so far."""
        end = at + keys.size(2)
        self.keys[:, :, at:end] = keys
        self.values[:, :, at:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class KeyValueCache:
    """What decoding need not compute again: a LayerCache for each decoder layer, `length` positions full."""

    def __init__(self, layers: list[LayerCache], source_keep: Tensor):
        self.layers = layers
        self.source_keep = source_keep  # (B, S) bool
        self.length = 0

    def reorder(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Let row i continue what row `rows[i]` has decoded. `sentences`, where some are done, says which of
        the B go on; `rows` then has as many fewer rows."""
        for layer in self.layers:
            for name in ("keys", "values"):
                full = getattr(layer, name)
                if sentences is not None:
                    setattr(layer, name, full[rows])
                else:
                    full[:, :, : self.length] = full[rows, :, : self.length]
            if sentences is not None:
                layer.cross_keys, layer.cross_values = (
                    layer.cross_keys[sentences],
                    layer.cross_values[sentences],
                )
        if sentences is not None:
            self.source_keep = self.source_keep[sentences]


def rotate(x: Tensor, offset: int) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021): turn (.., T, D) queries or keys by angles that grow
    with the position, which starts at `offset`; the halves of D are the two coordinates."""
    length, half = x.size(-2), x.size(-1) // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.arange(offset, offset + length, device=x.device)[:, None] * rates  # (T, D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention in `heads` parallel heads (Vaswani et al. 2017, section 3.2).

    One matrix projects queries, keys and values: at once over the same input, in two slices over a memory.
    """

    def __init__(self, d_model: int, heads: int, rotary: bool = False, dropout: float = 0.0):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.query_key_value = nn.Linear(d_model, 3 * d_model)  # rows: queries, keys, values, each by heads
        self.output = nn.Linear(d_model, d_model)
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: LayerCache | None = None,
        cached: int = 0,
    ) -> Tensor:
        """Self-attention of x (N, T, E). `mask` is broadcastable to (N, H, T, T). With a cache, x continues
        the `cached` positions in it."""
        queries, keys, values = (self._split(part) for part in self.query_key_value(x).chunk(3, dim=-1))
        if self.rotary:
            queries, keys = rotate(queries, cached), rotate(keys, cached)
        if cache is not None:
            keys, values = cache.append(keys, values, cached)
            assert not cached or x.size(1) == 1, "after the first positions, one at a time"
        # A single query is the last position: it may see all the others, where is_causal would hide them.
        return self._merge(attend(queries, keys, values, self.dropout, mask, causal and x.size(1) > 1))

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D) of a memory (B, S, E)."""
        width = memory.size(-1)
        projection = self.query_key_value
        keys, values = F.linear(memory, projection.weight[width:], projection.bias[width:]).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def over_memory(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """Cross-attention of x (N, T, E) over projected (B, H, S, D). `mask` broadcasts to (B, H, T, S).

        The K rows of a sentence become further queries of it, so its keys are never copied. If `weights` is
        a list, the attention weights (N, H, T, S) are appended to it.
        """
        rows, length, width = x.shape
        x = x.reshape(keys.size(0), -1, width)  # (B, K*T, E)
        projection = self.query_key_value
        queries = self._split(F.linear(x, projection.weight[:width], projection.bias[:width]))
        if weights is None:
            out = attend(queries, keys, values, self.dropout, mask)
        else:
            probabilities = attention_weights(queries, keys, mask)  # (B, H, K*T, S)
            out = self.dropout(probabilities) @ values
            beams = probabilities.transpose(1, 2).reshape(rows, length, self.heads, -1)
            weights.append(beams.transpose(1, 2))
        return self._merge(out).reshape(rows, length, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, T, E) to (B, H, T, D)

    def _merge(self, x: Tensor) -> Tensor:
        merged: Tensor = self.output(x.transpose(1, 2).flatten(2))  # (B, H, T, D) to (B, T, E)
        return merged


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, dropout: Dropout, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, by PyTorch's fused kernel for the device; `dropout` is of the weights."""
    on_cpu = queries.device.type == "cpu"
    by_hand = on_cpu and dropout.active  # there the kernel would draw from a generator that threads share
    if causal and (mask is not None or by_hand):  # the kernel takes one or the other
        allowed = causal_mask(queries.size(2), queries.device)
        mask, causal = allowed if mask is None else mask & allowed, False
    dtype = queries.dtype
    if on_cpu and dtype == torch.bfloat16:
        # The gradient of the CPU's kernel takes several times as long in bf16 as in fp32, casts included.
        queries, keys, values = queries.float(), keys.float(), values.float()
    with torch.autocast(queries.device.type, enabled=False):
        if by_hand:
            out: Tensor = dropout(attention_weights(queries, keys, mask)) @ values
        else:
            rate = dropout.rate if dropout.active else 0.0
            out = F.scaled_dot_product_attention(queries, keys, values, mask, rate, causal)
    return out.to(dtype)


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax(Q K^T / sqrt(D)) that `attend` never shows: (B, H, T, S)."""
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)
