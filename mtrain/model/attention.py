"""Multi-head attention, its cache for decoding, and the masks. Letters in shapes: see `mtrain.model`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.model.dropout import Dropout
from mtrain.model.linear import Linear


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(length, length) bool: position i may look at positions 0 to i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class LayerCache:
    """Keys and values of one decoder layer: its own past, and the memory's, projected once.

    The K beams of a sentence share both. A slot of the past holds what one beam added at one position: slot
    t * K + k is of beam k at position t. All are (B*H, .., D), as batched matrix products want them.
    """

    def __init__(self, cross_keys: Tensor, cross_values: Tensor, beams: int, max_length: int):
        self.sentences, self.beams = len(cross_keys), beams
        self.cross_keys = cross_keys.flatten(0, 1).contiguous()  # (B*H, S, D)
        self.cross_values = cross_values.flatten(0, 1).contiguous()
        rows, _, width = self.cross_keys.shape
        self.keys = cross_keys.new_empty(rows, max_length * beams, width)  # (B*H, slots, D)
        self.values = torch.empty_like(self.keys)

    def append(self, keys: Tensor, values: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Store (B, H, K*T, D) from position `at` on; returns all keys and values so far."""
        start = at * self.beams
        end = start + keys.size(2)
        self.keys[:, start:end] = keys.flatten(0, 1)
        self.values[:, start:end] = values.flatten(0, 1)
        return self.keys[:, :end], self.values[:, :end]

    def keep(self, sentences: Tensor, slots: int) -> None:
        """Go on with some of the sentences; `slots` slots are full."""
        for name in ("keys", "values", "cross_keys", "cross_values"):
            full: Tensor = getattr(self, name)
            old = full.view(self.sentences, -1, *full.shape[1:])
            if name.startswith("cross"):
                new = old[sentences]
            else:
                new = old.new_empty(len(sentences), *old.shape[1:])
                new[:, :, :slots] = old[sentences, :, :slots]
            setattr(self, name, new.flatten(0, 1))
        self.sentences = len(sentences)


class KeyValueCache:
    """What decoding need not compute again: a LayerCache for each decoder layer, `length` positions full.

    Beams that change places move no keys: `past` says which slots are the past of which beam. Masks are kept
    as what they add to attention scores, 0 where queries may look and -inf elsewhere.
    """

    def __init__(self, layers: list[LayerCache], source_keep: Tensor, beams: int):
        self.layers, self.beams, self.length = layers, beams, 0
        keys = layers[0].keys
        self.heads = len(keys) // len(source_keep)
        self.source = None if source_keep.all() else self._for_heads(_bias(source_keep[:, None], keys))
        self.own = _bias(torch.eye(beams, dtype=torch.bool, device=keys.device), keys)  # (K, K)
        self.past = keys.new_zeros(len(source_keep), beams, 0)  # (B, K, slots)

    def extend(self, length: int) -> Tensor | None:
        """Count `length` more positions for each beam, more than one at a time only if there is one beam.
        Returns what hides slots from them, (B*H or 1, K*T, slots); None: nothing does."""
        self.length += length
        if self.beams == 1:
            allowed = causal_mask(self.length, self.past.device)[-length:]
            return _bias(allowed, self.past)[None] if length > 1 else None
        assert length == 1, "several beams go on by one position at a time"
        self.past = torch.cat([self.past, self.own.expand(len(self.past), -1, -1)], dim=-1)
        return self._for_heads(self.past)

    def _for_heads(self, bias: Tensor) -> Tensor:
        """(B, .., ..) as (B*H, .., ..)."""
        return bias[:, None].expand(-1, self.heads, -1, -1).flatten(0, 1)

    def reorder(self, parents: Tensor, sentences: Tensor | None = None) -> None:
        """Let beam k of sentence b continue what its beam parents[b, k] has decoded; (B, K). `sentences`,
        where some are done, are those that go on, and `parents` has their rows alone."""
        if sentences is not None:
            for layer in self.layers:
                layer.keep(sentences, self.length * self.beams)
            if self.source is not None:
                self.source = self.source.view(-1, self.heads, *self.source.shape[1:])[sentences].flatten(
                    0, 1
                )
            self.past = self.past[sentences]
        if self.beams > 1:
            self.past = self.past.gather(1, parents[:, :, None].expand(-1, -1, self.past.size(2)))


def _bias(allowed: Tensor, like: Tensor) -> Tensor:
    """0 where a mask is True, -inf elsewhere, in the dtype of another tensor."""
    return like.new_zeros(allowed.shape).masked_fill_(~allowed, -math.inf)


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
        self.query_key_value = Linear(d_model, 3 * d_model)  # rows: queries, keys, values, each by heads
        self.output = Linear(d_model, d_model)
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Self-attention of x (N, T, E). `mask` is broadcastable to (N, H, T, T)."""
        queries, keys, values = self._split(self.query_key_value(x), 3)
        if self.rotary:
            positions = torch.arange(x.size(1), device=x.device)
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        return self._merge(attend(queries, keys, values, self.dropout, mask, causal))

    def continued(self, x: Tensor, cache: LayerCache, at: int, past: Tensor | None) -> Tensor:
        """Self-attention of x (N, T, E) that continues `at` positions in the cache, where `past` (see
        `KeyValueCache.extend`) hides some. Without dropout."""
        projected = self.query_key_value(x)
        # The K rows of a sentence become further queries of it.
        queries, keys, values = self._split(projected.view(cache.sentences, -1, projected.size(-1)), 3)
        if self.rotary:
            positions = torch.arange(at, at + x.size(1), device=x.device)
            positions = positions.repeat(queries.size(2) // x.size(1))
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        keys, values = cache.append(keys, values, at)
        mixed = torch.bmm(_weights(queries.flatten(0, 1), keys, past), values)  # (B*H, K*T, D)
        return self._merge(mixed.view(queries.shape)).view_as(x)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D) of a memory (B, S, E)."""
        keys, values = self._split(self.query_key_value.rows(memory, memory.size(-1)), 2)
        return keys, values

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
        queries = self._queries(x, len(keys))
        if weights is None:
            out = attend(queries, keys, values, self.dropout, mask)
        else:
            probabilities = attention_weights(queries, keys, mask)  # (B, H, K*T, S)
            out = self.dropout(probabilities) @ values
            weights.append(self._by_rows(probabilities, x))
        return self._merge(out).reshape(x.shape)

    def over_cache(
        self, x: Tensor, cache: LayerCache, hidden: Tensor | None, weights: list[Tensor] | None = None
    ) -> Tensor:
        """As `over_memory`, of keys and values in a cache, of which `hidden` (B*H, 1, S) is -inf at those
        that are padding. Without dropout."""
        queries = self._queries(x, cache.sentences)
        probabilities = _weights(queries.flatten(0, 1), cache.cross_keys, hidden)  # (B*H, K*T, S)
        if weights is not None:
            weights.append(self._by_rows(probabilities.view(*queries.shape[:2], *probabilities.shape[1:]), x))
        return self._merge(torch.bmm(probabilities, cache.cross_values).view(queries.shape)).view_as(x)

    def _queries(self, x: Tensor, sentences: int) -> Tensor:
        """Queries (B, H, K*T, D) of x (B*K, T, E)."""
        (queries,) = self._split(
            self.query_key_value.rows(x, 0, x.size(-1)).view(sentences, -1, x.size(-1)), 1
        )
        return queries

    def _by_rows(self, probabilities: Tensor, x: Tensor) -> Tensor:
        """Attention weights (B, H, K*T, S) as (N, H, T, S)."""
        rows, length, _ = x.shape
        return probabilities.transpose(1, 2).reshape(rows, length, self.heads, -1).transpose(1, 2)

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """The parts (B, H, T, D) of x (B, T, parts * E)."""
        return x.view(*x.shape[:2], parts, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

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


def _weights(queries: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """The same (B*H, T, S) for decoding: of queries (B*H, T, D), keys (B*H, S, D) and a bias that broadcasts.
    With few queries the fused kernel takes longer to set up than these products take in all."""
    scale, keys = queries.size(-1) ** -0.5, keys.transpose(1, 2)
    if bias is None:
        return torch.bmm(queries * scale, keys).softmax(dim=-1)
    return torch.baddbmm(bias, queries, keys, alpha=scale).softmax(dim=-1)
