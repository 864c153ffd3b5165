"""Decoding one position at a time in buffers of fixed shapes, as CUDA graphs require. Symbols in shapes: see
`mtrain.model`; T is the number of positions in the buffers.

It computes the same as `mtrain.model.incremental`. The position is in a tensor, keys and values that no beam
needs any more are not removed, and the kernels come from `mtrain.kernels.decoding_step`.
"""

import torch
from torch import Tensor, nn

from mtrain.kernels.decoding_step import add_norm, cross_attention, self_attention
from mtrain.kernels.precision import product_fp32
from mtrain.kernels.sequences import Padded
from mtrain.model.incremental import DecodingTransformer, memory_keys_and_values
from mtrain.model.transformer import DecoderLayer, MultiHeadAttention, Residual, rotate


class StaticDecoder:
    """Keys and values for B sentences with S source tokens and K rows each, in T positions, and the steps
    that use them.

    `caches` (2, B, H, T*K, D) of each layer are of the target tokens so far, `memories` (2, B, H, S, D) of
    the encoder output. A step may be of the first sentences only.
    """

    def __init__(
        self, model: DecodingTransformer, sentences: int, beams: int, source_length: int, positions: int
    ):
        self.model, self.beams = model, beams
        heads, packed, like = model.config.heads, model.packed, model.low_weight
        width = model.config.d_model // heads
        self.caches, self.memories = (
            [like.new_zeros(2, sentences, heads, length, width) for _ in packed.decoder]
            for length in (positions * beams, source_length)
        )
        self.target_table = packed.embed.positions(0, positions, packed.learned_target_positions)

    def encode(self, source: Tensor, source_lengths: Tensor) -> None:
        """Store keys and values of the encoder output, for source ids (B, S) and their numbers (B)."""
        keep = torch.arange(source.size(1), device=source.device) < source_lengths[:, None]
        packed, memory = self.model.packed, self.model.encode(source, keep)
        # Kept because a graph reads it: a longer source may replace the table of the model.
        self.source_table = packed.embed.positions(0, source.size(1), packed.learned_positions)
        for layer, stored in zip(packed.decoder, self.memories, strict=True):
            assert isinstance(layer, DecoderLayer)
            for part, new in zip(stored, memory_keys_and_values(layer.cross_attention, memory), strict=True):
                part.copy_(new)

    def decode_next(
        self, last: Tensor, past_keep: Tensor | None, position: Tensor, source_lengths: Tensor
    ) -> Tensor:
        """Logits (N, V) of the tokens that follow `last` (B', K) in the first B' sentences, in fp32 or fp64.
        `source_lengths` (B') are int32; for the rest see `self_attention`."""
        model, sentences = self.model.packed, len(last)
        embedding = model.target_embedding or model.source_embedding
        table = self.target_table
        positions = None if table is None else table.index_select(0, position)  # (1, E)
        x = model.embed(last.flatten(), Padded(last.numel(), 1), embedding, positions)
        stream = _ResidualStream(x, self.model.low_weight.dtype)
        for layer, cache, memory in zip(model.decoder, self.caches, self.memories, strict=True):
            assert isinstance(layer, DecoderLayer)
            attention = layer.self_attention
            h = attention.query_key_value.forward(stream.before(layer.self_attention_residual))
            if attention.rotary:
                _rotate_(h, attention, position)
            h = self_attention(h, cache[:, :sentences], past_keep, position)
            stream.after(layer.self_attention_residual, attention.output.forward(h))
            attention = layer.cross_attention
            h = stream.before(layer.cross_attention_residual)
            h = attention.query_key_value.slice(h, 0, h.size(-1))
            h = cross_attention(h, memory[:, :sentences], source_lengths)
            stream.after(layer.cross_attention_residual, attention.output.forward(h))
            h = layer.feed_forward(stream.before(layer.feed_forward_residual))
            stream.after(layer.feed_forward_residual, h)
        # In bf16, the best logits would often be equal.
        logits = product_fp32(stream.normalized(model.decoder_norm), self.model.low_weight.t())
        return logits if self.model.bias is None else logits.add_(self.model.bias)

    def move(self, sentences: Tensor, positions: int) -> None:
        """Let the given sentences (B') be the first ones, after some positions."""
        for buffers, length in ((self.caches, positions * self.beams), (self.memories, None)):
            for buffer in buffers:
                used = buffer[:, :, :, :length]
                used[:, : len(sentences)] = used[:, sentences]


class _ResidualStream:
    """The residual stream x (N, E) of a step, changed in place: `Residual` for `add_norm`."""

    def __init__(self, x: Tensor, dtype: torch.dtype):
        self.x, self.dtype = x, dtype
        self._added: Tensor | None = None  # what is still to be added to x
        self._normed = x  # with norms after the residual connections: x in the type of products

    def before(self, residual: Residual) -> Tensor:
        """The input of a sublayer."""
        if residual.pre:
            return self.normalized(residual.norm)
        return self._normed.to(self.dtype)

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
