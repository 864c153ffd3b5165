"""Multi-head attention and the masks. Letters in shapes: see `mtrain.model`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.kernels.attention import EagerAttention
from mtrain.model.cache import REGISTER, LayerCache
from mtrain.model.dropout import Dropout
from mtrain.model.linear import Linear

# Numbers in the last register at which it is worth filling: 15 keys take a CPU up to three times as long as
# 16, but what is put behind them is to be copied, and differentiated.
_WORTH_FILLING = 11
# Most keys for which training on a CPU computes the weights by themselves: it takes up to a third less time
# than the fused kernel for 8 to 32 keys, as long for 128, a quarter more for 256. Their weights are kept, so
# there may be no more of them than twice a head's width: as many numbers as queries and keys have.
_EAGER = 64


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(length, length) bool: position i may look at positions 0 to i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


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
        queries, keys, values = self._split(self.query_key_value(x), 3, len(x)).unbind(0)
        if self.rotary:
            positions = torch.arange(x.size(1), device=x.device)
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        return self._merge(attend(queries, keys, values, self.dropout, mask, causal))

    def continued(self, x: Tensor, cache: LayerCache, at: int, past: Tensor | None) -> Tensor:
        """Self-attention of x (N, E) at position `at`, which the cache then holds, too, and where `past` (see
        `KeyValueCache.extend`) hides some. Without dropout."""
        parts = self._split(self.query_key_value.forward(x), 3, cache.sentences)
        queries, added = parts[0], parts[1:]
        if self.rotary:
            position = torch.arange(at, at + 1, device=x.device)
            queries, added = rotate(queries, position), torch.stack([rotate(added[0], position), added[1]])
        return self._mix(queries, *cache.append(added), past)[0]

    def _mix(
        self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention (N, E) of queries (B, H, K, D) over keys (B*H, D, S) and values (B*H, S, D), and its
        weights (B*H, K, S). With so few queries the fused kernel takes longer to set up than these products
        in all."""
        weights = _weights(queries.flatten(0, 1), keys, bias)
        heads = torch.bmm(weights, values)
        if queries.size(2) > 1:
            heads = heads.view(queries.shape).transpose(1, 2)  # (B, K, H, D)
        return self.output.forward(heads.reshape(-1, self.output.in_features)), weights

    def project_memory(self, memory: Tensor) -> Tensor:
        """Keys and values (2, B, H, S, D) of a memory (B, S, E)."""
        return self._split(self.query_key_value.rows(memory, memory.size(-1)), 2, len(memory))

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
            weights.append(self._by_rows(probabilities, len(x)))
        return self._merge(out).reshape(x.shape)

    def over_cache(
        self, x: Tensor, cache: LayerCache, hidden: Tensor | None, weights: list[Tensor] | None = None
    ) -> Tensor:
        """As `over_memory`, of x (N, E), which is one position of each row, over keys and values in a cache,
        of which `hidden` (B*H, 1, S) is -inf at those that are padding. Without dropout."""
        queries = self._queries(x, cache.sentences)
        out, probabilities = self._mix(queries, *cache.memory, hidden)
        if weights is not None:
            shown = probabilities[:, :, : cache.source_length].reshape(*queries.shape[:-1], -1)
            weights.append(self._by_rows(shown, len(x)))
        return out

    def _queries(self, x: Tensor, sentences: int) -> Tensor:
        """Queries (B, H, K*T, D) of x (N, T, E), or (N, E)."""
        return self._split(self.query_key_value.rows(x, 0, x.size(-1)), 1, sentences)[0]

    def _by_rows(self, probabilities: Tensor, rows: int) -> Tensor:
        """Attention weights (B, H, K*T, S) as (N, H, T, S)."""
        by_position = probabilities.transpose(1, 2)
        return by_position.reshape(rows, -1, self.heads, probabilities.size(-1)).transpose(1, 2)

    def _split(self, x: Tensor, parts: int, sentences: int) -> Tensor:
        """The parts of x (.., parts * E), by heads: (parts, B, H, K*T, D). The K rows of a sentence become
        further queries of it."""
        width = x.size(-1) // (parts * self.heads)
        return x.view(sentences, -1, parts, self.heads, width).permute(2, 0, 3, 1, 4)

    def _merge(self, x: Tensor) -> Tensor:
        merged: Tensor = self.output(x.transpose(1, 2).flatten(2))  # (B, H, T, D) to (B, T, E)
        return merged


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, dropout: Dropout, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, by what is the fastest on the device; `dropout` is of the weights."""
    on_cpu = queries.device.type == "cpu"
    by_hand = on_cpu and dropout.active  # there the kernel would draw from a generator that threads share
    few = keys.size(2) <= min(_EAGER, 2 * keys.size(3))
    eager = on_cpu and not by_hand and few and _learns(queries, keys, values)
    if causal and (mask is not None or by_hand or eager):  # the kernel takes one or the other
        allowed = causal_mask(queries.size(2), queries.device)
        mask, causal = allowed if mask is None else mask & allowed, False
    dtype = queries.dtype
    if on_cpu and dtype == torch.bfloat16:
        # The gradient of the CPU's kernel takes several times as long in bf16 as in fp32, casts included.
        queries, keys, values = queries.float(), keys.float(), values.float()
    with torch.autocast(queries.device.type, enabled=False):
        if by_hand:
            out: Tensor = dropout(attention_weights(queries, keys, mask)) @ values
        elif eager:
            out = EagerAttention.apply(queries, keys, values, mask)  # type: ignore[no-untyped-call]
        else:
            if on_cpu and keys.size(2) % REGISTER >= _WORTH_FILLING and (causal or mask is not None):
                keys, values, mask = _filled(keys, values, mask)
            rate = dropout.rate if dropout.active else 0.0
            out = F.scaled_dot_product_attention(queries, keys, values, mask, rate, causal)
    return out.to(dtype)


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _filled(keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values (B, H, S, D) with others behind them that nothing looks at, up to whole registers. A
    causal mask hides them by itself."""
    missing = -keys.size(2) % REGISTER
    keys, values = (F.pad(x, (0, 0, 0, missing)) for x in (keys, values))
    return keys, values, None if mask is None else F.pad(mask, (0, missing))


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax(Q K^T / sqrt(D)) that `attend` never shows: (B, H, T, S)."""
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)


def _weights(queries: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """The same (B*H, K, S) of queries (B*H, K, D), keys (B*H, D, S) and a bias that broadcasts."""
    scale = queries.size(-1) ** -0.5
    start, beta = (queries.new_empty(1), 0) if bias is None else (bias, 1)  # what is times 0 is not read
    return torch.baddbmm(start, queries, keys, beta=beta, alpha=scale).softmax(dim=-1)
