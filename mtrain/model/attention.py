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
    """Keys and values of one decoder layer: its own past, and the memory's, projected once.

    The K beams of a sentence share both. A slot of the past holds what one beam added at one position: slot
    t * K + k is of beam k at position t.
    """

    def __init__(self, cross_keys: Tensor, cross_values: Tensor, beams: int, max_length: int):
        sentences, heads, _, width = cross_keys.shape
        dtype = _attention_dtype(cross_keys)
        self.beams = beams
        self.cross_keys, self.cross_values = cross_keys.to(dtype), cross_values.to(dtype)  # (B, H, S, D)
        self.keys = self.cross_keys.new_empty(sentences, heads, max_length * beams, width)  # (B, H, slots, D)
        self.values = torch.empty_like(self.keys)

    def append(self, keys: Tensor, values: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Store (B, H, K*T, D) from position `at` on; returns all keys and values so far."""
        start = at * self.beams
        end = start + keys.size(2)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, sentences: Tensor, slots: int) -> None:
        """Go on with some of the sentences; `slots` slots are full."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(len(sentences), *old.shape[1:])
            new[:, :, :slots] = old[sentences, :, :slots]
            setattr(self, name, new)
        self.cross_keys, self.cross_values = self.cross_keys[sentences], self.cross_values[sentences]


class KeyValueCache:
    """What decoding need not compute again: a LayerCache for each decoder layer, `length` positions full.

    Beams that change places move no keys: `past` says which slots are the past of which beam.
    """

    def __init__(self, layers: list[LayerCache], source_keep: Tensor, beams: int):
        self.layers, self.beams = layers, beams
        self.source_keep = source_keep  # (B, S) bool
        self.length = 0
        self.past = source_keep.new_ones(len(source_keep), beams, 0)  # (B, K, slots) bool

    def extend(self, length: int) -> Tensor | None:
        """Count `length` more positions for each beam, more than one at a time only if there is one beam.
        Returns which slots they may look at, (T, slots) or (B, 1, K, slots) bool; None: all of them."""
        self.length += length
        if self.beams == 1:
            return causal_mask(self.length, self.past.device)[-length:] if length > 1 else None
        assert length == 1, "several beams go on by one position at a time"
        own = torch.eye(self.beams, dtype=torch.bool, device=self.past.device)
        self.past = torch.cat([self.past, own.expand(len(self.past), -1, -1)], dim=-1)
        return self.past[:, None]

    def reorder(self, parents: Tensor, sentences: Tensor | None = None) -> None:
        """Let beam k of sentence b continue what its beam parents[b, k] has decoded; (B, K). `sentences`,
        where some are done, are those that go on, and `parents` has their rows alone."""
        if sentences is not None:
            for layer in self.layers:
                layer.keep(sentences, self.length * self.beams)
            self.source_keep, self.past = self.source_keep[sentences], self.past[sentences]
        if self.beams > 1:
            self.past = self.past.gather(1, parents[:, :, None].expand(-1, -1, self.past.size(2)))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021): turn (.., T, D) queries or keys by angles that grow
    with their `positions` (T); the halves of D are the two coordinates."""
    half = x.size(-1) // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = positions[:, None] * rates  # (T, D/2)
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
        the `cached` positions in it, and `mask` is from `KeyValueCache.extend`."""
        projected = self.query_key_value(x)
        if cache is not None:  # the K rows of a sentence become further queries of it
            projected = projected.view(cache.keys.size(0), -1, projected.size(-1))
        queries, keys, values = (self._split(part) for part in projected.chunk(3, dim=-1))
        if self.rotary:
            positions = torch.arange(cached, cached + x.size(1), device=x.device)
            positions = positions.repeat(queries.size(2) // x.size(1))
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        if cache is not None:
            keys, values = cache.append(keys, values, cached)
        return self._merge(attend(queries, keys, values, self.dropout, mask, causal)).view_as(x)

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
    dtype, wanted = queries.dtype, _attention_dtype(queries)
    queries, keys, values = queries.to(wanted), keys.to(wanted), values.to(wanted)
    with torch.autocast(queries.device.type, enabled=False):
        if by_hand:
            out: Tensor = dropout(attention_weights(queries, keys, mask)) @ values
        else:
            rate = dropout.rate if dropout.active else 0.0
            out = F.scaled_dot_product_attention(queries, keys, values, mask, rate, causal)
    return out.to(dtype)


def _attention_dtype(x: Tensor) -> torch.dtype:
    """fp32 for bf16 on a CPU, whose kernel's gradient takes several times as long in bf16, casts included."""
    return torch.float32 if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x.dtype


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax(Q K^T / sqrt(D)) that `attend` never shows: (B, H, T, S)."""
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)
