"""Decoding one position at a time in buffers of fixed shapes, as CUDA graphs require. Symbols in shapes: see
`mtrain.model`; T is the number of positions in the buffers, P the number of source tokens of a batch.

It computes the same as `mtrain.model.incremental`. The position is in a tensor, keys and values that no beam
needs any more are not removed, and the kernels come from `mtrain.kernels.decoding_step`.
"""

import torch
from torch import Tensor, nn

from mtrain.kernels.decoding_step import add_norm, cross_attention, self_attention
from mtrain.kernels.precision import product_fp32
from mtrain.kernels.sequences import Packed, Padded
from mtrain.model.incremental import DecodingTransformer
from mtrain.model.transformer import MultiHeadAttention, Residual, rotate


class StaticDecoder:
    """Keys and values for B sentences with up to S source tokens and K rows each, in T positions, and the
    steps that use them.

    `caches` (2, B, H, T*K, D) of each layer are of the target tokens so far, `memories` (B*S, 2, H, D) of the
    encoder output, token after token. A step may be of the first sentences only.
    """

    def __init__(
        self, model: DecodingTransformer, sentences: int, beams: int, source_length: int, positions: int
    ):
        self.model, self.beams, self.source_length = model, beams, source_length
        heads, packed, like = model.config.heads, model.packed, model.low_weight
        width, layers = model.config.d_model // heads, range(len(packed.decoder))
        self.caches = [like.new_zeros(2, sentences, heads, positions * beams, width) for _ in layers]
        self.memories = [like.new_zeros(sentences * source_length, 2, heads, width) for _ in layers]
        # Kept because graphs read them: a longer source may replace the table of the model.
        self.source_table = packed.embed.positions(0, source_length, packed.learned_positions)
        self.target_table = packed.embed.positions(0, positions, packed.learned_target_positions)

    def encode(self, ids: Tensor, sources: Packed) -> None:
        """Store keys and values of the encoder output, for the ids (P) of source tokens."""
        model, dtype = self.model.packed, self.model.low_weight.dtype
        x = model.embed(ids, sources, model.source_embedding, self.source_table)
        stream = _ResidualStream(x, dtype)
        for layer in model.encoder:
            h = layer.self_attention(stream.before(layer.self_attention_residual), sources)
            stream.after(layer.self_attention_residual, h)
            h = layer.feed_forward(stream.before(layer.feed_forward_residual))
            stream.after(layer.feed_forward_residual, h)
        memory = stream.normalized(model.encoder_norm)
        for decoder_layer, stored in zip(model.decoder, self.memories, strict=True):
            attention = decoder_layer.cross_attention
            projected = attention.query_key_value.slice(memory, memory.size(1))  # (P, 2E)
            stored.flatten(1)[: len(ids)].copy_(projected)

    def decode_next(self, last: Tensor, past_keep: Tensor | None, position: Tensor, spans: Tensor) -> Tensor:
        """Logits (N, V) of the tokens that follow `last` (B', K) in the first B' sentences, in fp32 or fp64.
        For `spans` (B', 2) of sources see `cross_attention`, for the rest `self_attention`."""
        model, sentences = self.model.packed, len(last)
        embedding = model.target_embedding or model.source_embedding
        table = self.target_table
        positions = None if table is None else table.index_select(0, position)  # (1, E)
        x = model.embed(last.flatten(), Padded(last.numel(), 1), embedding, positions)
        stream = _ResidualStream(x, self.model.low_weight.dtype)
        for layer, cache, memory in zip(model.decoder, self.caches, self.memories, strict=True):
            attention = layer.self_attention
            h = attention.query_key_value.forward(stream.before(layer.self_attention_residual))
            if attention.rotary:
                _rotate_(h, attention, position)
            h = self_attention(h, cache[:, :sentences], past_keep, position)
            stream.after(layer.self_attention_residual, attention.output.forward(h))
            attention = layer.cross_attention
            h = stream.before(layer.cross_attention_residual)
            h = attention.query_key_value.slice(h, 0, h.size(-1))
            h = cross_attention(h, memory, spans, self.source_length)
            stream.after(layer.cross_attention_residual, attention.output.forward(h))
            h = layer.feed_forward(stream.before(layer.feed_forward_residual))
            stream.after(layer.feed_forward_residual, h)
        # In bf16, the best logits would often be equal.
        logits = product_fp32(stream.normalized(model.decoder_norm), self.model.low_weight.t())
        return logits if self.model.bias is None else logits.add_(self.model.bias)

    def move(self, sentences: Tensor, positions: int) -> None:
        """Let the given sentences (B') be the first ones, after some positions."""
        for cache in self.caches:
            used = cache[:, :, :, : positions * self.beams]
            used[:, : len(sentences)] = used[:, sentences]


class _ResidualStream:
    """The residual stream x (N or P, E), changed in place: `Residual` for `add_norm`."""

    def __init__(self, x: Tensor, dtype: torch.dtype):
        self.x, self.dtype = x, dtype
        self._added: Tensor | None = None  # what is still to be added to x
        self._normed = x  # with norms after the residual connections: x in the type of products

    def before(self, residual: Residual) -> Tensor:
        """The input of a sublayer."""
        return self.normalized(residual.norm) if residual.pre else self._normed.to(self.dtype)

    def after(self, residual: Residual, y: Tensor) -> None:
        """Add the output y of a sublayer."""
        if residual.pre:
            self._added = y
        else:
            self._normed = add_norm(self.x, y, residual.norm, self.dtype, replace=True)

    def normalized(self, norm: nn.Module) -> Tensor:
        """The norm of the stream; the stream itself without one."""
        if not isinstance(norm, nn.LayerNorm):
            return self._normed.to(self.dtype)
        normed = add_norm(self.x, self._added, norm, self.dtype)
        self._added = None
        return normed


def _rotate_(projected: Tensor, attention: MultiHeadAttention, position: Tensor) -> None:
    """Rotate the queries and keys of `projected` (N, 3E) in place."""
    by_head = projected.view(len(projected), 3 * attention.heads, -1)[:, : 2 * attention.heads]
    by_head.copy_(rotate(by_head, position))
