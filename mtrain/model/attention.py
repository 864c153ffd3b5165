"""Multi-head attention. Symbols in shapes: see `mtrain.model`."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtrain.kernels import attention as kernels
from mtrain.kernels.autocast import without_autocast
from mtrain.kernels.precision import widest_float
from mtrain.model.cache import LayerCache
from mtrain.model.layers import Dropout, Linear

# Maximum number of keys for which training on a CPU uses the eager kernel. Compared with the fused kernel, it
# takes up to a third less time for 8 to 32 keys, equally long for 128, and a quarter longer for 256. It also
# stores the attention weights, which take no more memory than queries and keys, because the number of keys is
# limited to twice the head width as well.
_MAX_EAGER_KEYS = 64


@dataclass
class AttentionWeights:
    """Attention weights of each layer, which `Transformer.encode` and `Transformer.decode` append on request.

    They are the weights before dropout, so each row sums to 1. A list that is None is not wanted.
    """

    encoder: list[Tensor] | None = field(default_factory=list)  # encoder self-attention, each (B, H, S, S)
    decoder: list[Tensor] | None = field(default_factory=list)  # decoder self-attention, each (N, H, T, T)
    cross: list[Tensor] = field(default_factory=list)  # decoder to encoder, each (N, H, T, S)


def suits_eager_kernel(keys: int, head_width: int) -> bool:
    """Whether training on a CPU computes attention over this many keys with `eager_attention`."""
    return keys <= min(_MAX_EAGER_KEYS, 2 * head_width)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(length, length) bool: position i may attend to positions 0 to i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _causal(keep: Tensor | None, x: Tensor) -> Tensor:
    """`keep` combined with the causal mask of the T positions of x (.., T, E or D)."""
    mask = causal_mask(x.size(-2), x.device)
    return mask if keep is None else keep & mask


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
        self,
        x: Tensor,
        keys_values: Tensor | None = None,
        keep: Tensor | None = None,
        causal: bool = False,
        attention_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """Self-attention (N, T, E) of x (N, T, E); with `keys_values` (B, S, 2 * E), which `project_memory`
        returns, attention to the encoder output.

        `keep` broadcasts to (N, H, T, T) or (B, H, T, S). With `causal`, each position attends to itself and
        those before it. If `attention_weights` is a list, the weights, of that shape, are appended to it.
        """
        if keys_values is None:
            projected, sentences = self.query_key_value(x), len(x)
        else:
            projected, sentences = self.query_key_value.slice(x, 0, x.size(-1)), len(keys_values)
        projected = projected.view(sentences, -1, projected.size(-1))  # (B, K*T, E or 3 * E)
        if self.rotary:
            projected = self._rotated(projected)
        if attention_weights is None and self._is_eager(projected, keys_values):
            keep = _causal(keep, x) if causal else keep
            attended = kernels.eager_attention(projected, keys_values, self.heads, keep)
            return self.output(attended).view(x.shape)  # type: ignore[no-any-return]
        parts = kernels.split_heads(projected, keys_values, self.heads)
        queries, keys, values = (part.transpose(1, 2) for part in parts)  # (B, H, K*T or S, D)
        weights: list[Tensor] | None = None if attention_weights is None else []
        attended = attend(queries, keys, values, self.dropout, keep, causal, weights)  # (B, H, K*T, D)
        if attention_weights is not None and weights:
            attention_weights.append(self._by_row(weights[0], len(x)))
        return self.output(attended.transpose(1, 2).flatten(2)).view(x.shape)  # type: ignore[no-any-return]

    def _rotated(self, projected: Tensor) -> Tensor:
        """The queries, keys and values (N, T, 3 * E) with rotated queries and keys."""
        width = self.output.in_features
        rows, length, _ = projected.shape
        by_head = projected[..., : 2 * width].reshape(rows, length, 2 * self.heads, -1)  # queries, then keys
        positions = torch.arange(length, device=projected.device)[:, None]
        return torch.cat([rotate(by_head, positions).flatten(2), projected[..., 2 * width :]], dim=-1)

    def _is_eager(self, projected: Tensor, keys_values: Tensor | None) -> bool:
        """Whether `eager_attention` is the fastest kernel: in training on short sentences, on a CPU."""
        keys = (projected if keys_values is None else keys_values).size(1)
        width = self.output.in_features // self.heads
        trained = projected.requires_grad or (keys_values is not None and keys_values.requires_grad)
        on_cpu = projected.device.type == "cpu"
        return on_cpu and trained and suits_eager_kernel(keys, width) and not self.dropout.active

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

    def step_over_memory(
        self,
        x: Tensor,
        cache: LayerCache,
        source_keep_bias: Tensor | None,
        attention_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """Attention (N, E) of x (N, E), one position of each row, to the encoder output in the cache.

        If `attention_weights` is a list, the weights (N, H, 1, S) are appended to it.
        """
        queries = self.query_key_value.slice(x, 0, x.size(-1))
        queries = self._split_heads(queries, 1, cache.sentences)[0]
        keys, values = cache.memory_keys, cache.memory_values
        attended, weights = kernels.cached_attention(queries, keys, values, source_keep_bias)
        if attention_weights is not None:
            weights = weights[:, :, : cache.source_length].reshape(*queries.shape[:-1], -1)  # (B, H, K, S)
            attention_weights.append(self._by_row(weights, len(x)))
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

    def _by_row(self, weights: Tensor, rows: int) -> Tensor:
        """Attention weights (B, H, K*T, S) as (N, H, T, S)."""
        by_position = weights.transpose(1, 2)  # (B, K*T, H, S)
        return by_position.reshape(rows, -1, self.heads, weights.size(-1)).transpose(1, 2)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    dropout: Dropout,
    keep: Tensor | None = None,
    causal: bool = False,
    attention_weights: list[Tensor] | None = None,
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, by PyTorch's fused kernel where it can be used.

    queries (B, H, T, D), keys and values (B, H, S, D); `keep` broadcasts to (B, H, T, S). `dropout` applies
    to the weights. If `attention_weights` is a list, the weights before dropout are appended to it.
    """
    dtype, on_cpu = queries.dtype, queries.device.type == "cpu"
    # On a CPU the fused kernel would draw its dropout from a generator that all threads share.
    explicit = attention_weights is not None or (on_cpu and dropout.active)
    # The fused kernel takes a mask or `causal`, not both; the other takes only a mask.
    if causal and (explicit or keep is not None):
        keep, causal = _causal(keep, queries), False
    if on_cpu and dtype == torch.bfloat16:
        # On a CPU the backward pass of the fused kernel takes several times as long in bf16 as in fp32.
        queries, keys, values = queries.float(), keys.float(), values.float()
    with without_autocast(queries):
        if explicit:
            weights = kernels.attention_weights(queries, keys, keep)
            if attention_weights is not None:
                attention_weights.append(weights)
            out: Tensor = dropout(weights) @ values
        else:
            rate = dropout.rate if dropout.active else 0.0
            out = kernels.fused_attention(queries, keys, values, keep, causal, rate)
    return out.to(dtype)
