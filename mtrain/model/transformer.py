"""The encoder-decoder Transformer. Symbols in shapes: see `mtrain.model`."""

import copy
import math
from typing import Self

import torch
from torch import Tensor, nn

from mtrain.config.model import ModelConfig
from mtrain.kernels.linear import PackedLinear, linear, pack
from mtrain.kernels.module_calls import reduce_call_overhead
from mtrain.model.attention import AttentionWeights, MultiHeadAttention
from mtrain.model.cache import KeyValueCache, LayerCache
from mtrain.model.layers import Dropout, FeedForward, Linear, Residual


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each in a residual connection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = _attention(config, config.positions == "rotary")
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.feed_forward_residual = Residual(config), Residual(config)

    def forward(self, x: Tensor, keep: Tensor, attention_weights: list[Tensor] | None = None) -> Tensor:
        """x (B, S, E), keep (B, 1, 1, S). If a list, the weights (B, H, S, S) are appended to it."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, keep=keep, attention_weights=attention_weights)
        )
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder output ("memory"), then a feed-forward network."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = _attention(config, config.positions == "rotary")
        self.cross_attention = _attention(config)
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.cross_attention_residual = Residual(config), Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self, x: Tensor, memory: Tensor, keep: Tensor, attention_weights: AttentionWeights | None = None
    ) -> Tensor:
        """x (N, T, E), memory (B, S, E), keep (B, 1, 1, S). Appends to `attention_weights` if given."""
        keys_values = self.cross_attention.project_memory(memory)
        self_weights, cross_weights = (
            (None, None)
            if attention_weights is None
            else (attention_weights.decoder, attention_weights.cross)
        )
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, causal=True, attention_weights=self_weights)
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, keys_values, keep, attention_weights=cross_weights)
        )
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]

    def step(
        self,
        x: Tensor,
        cache: LayerCache,
        position: int,
        past_keep_bias: Tensor | None,
        source_keep_bias: Tensor | None,
        cross_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """`forward` for x (N, E) at one position, given a cache of earlier positions and of the memory."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention.step(y, cache, position, past_keep_bias)
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.step_over_memory(y, cache, source_keep_bias, cross_weights)
        )
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


def _attention(config: ModelConfig, rotary: bool = False) -> MultiHeadAttention:
    return MultiHeadAttention(config.d_model, config.heads, rotary, config.attention_dropout)


def sinusoidal_positions(length: int, width: int, interleaved: bool = False) -> Tensor:
    """(length, width) table of sin and cos of p / 10000^(2i/width) (Vaswani et al. 2017, section 3.5).

    All sines come first, then all cosines, as in Marian; or they alternate, as in the paper.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # (length, width / 2)
    parts = [angles.sin(), angles.cos()]
    table = torch.stack(parts, dim=-1).flatten(1) if interleaved else torch.cat(parts, dim=-1)
    return table.to(torch.get_default_dtype())


class Transformer(nn.Module):
    """The encoder-decoder Transformer.

    Tied embeddings are one parameter with one name: `target_embedding` is None if it is tied to
    `source_embedding`, and `output_weight` is None if it is tied to the target embedding.
    """

    _sinusoids: Tensor  # (length, E)
    packed_projection: PackedLinear | None = None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width, tie = config.d_model, config.tie_embeddings
        self.source_embedding = nn.Embedding(config.source_vocab_size, width)
        self.target_embedding = None if tie == "all" else nn.Embedding(config.target_vocab_size, width)
        vocab = config.target_vocab_size
        self.output_weight = nn.Parameter(torch.empty(vocab, width)) if tie == "none" else None
        self.output_bias = nn.Parameter(torch.zeros(vocab)) if config.output_bias else None
        self.learned_positions = self.learned_target_positions = None
        if config.positions == "learned":
            self.learned_positions = nn.Embedding(config.max_positions, width)
            self.learned_target_positions = nn.Embedding(config.max_positions, width)
        elif config.positions != "rotary":
            self.register_buffer("_sinusoids", torch.empty(0), persistent=False)
            self.make_positions()
        self.dropout, self.word_dropout = Dropout(config.dropout), Dropout(config.word_dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        pre = config.norm == "pre"  # the output of the last layer is then not normalized yet
        self.encoder_norm: nn.Module = nn.LayerNorm(width) if pre else nn.Identity()
        self.decoder_norm: nn.Module = nn.LayerNorm(width) if pre else nn.Identity()
        self._initialize()

    def _initialize(self) -> None:
        """Xavier-uniform projections (Glorot and Bengio 2010), zero biases, embeddings of variance 1/E."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):  # three square matrices, not one wide one
                for part in module.query_key_value.weight.data.chunk(3):
                    nn.init.xavier_uniform_(part)
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=self.config.d_model**-0.5)

    def make_positions(self) -> None:
        """Compute the table of sinusoidal positions, which is not saved. It grows when it is too short.

        A model on the meta device has an empty table."""
        if self.config.positions.startswith("sinusoidal") and not self.source_embedding.weight.is_meta:
            self._sinusoids = self._sinusoidal_table(min(self.config.max_positions, 1024))

    def _sinusoidal_table(self, length: int) -> Tensor:
        interleaved = self.config.positions == "sinusoidal_interleaved"
        return sinusoidal_positions(length, self.config.d_model, interleaved)

    def positions(self, start: int, length: int, target: bool) -> Tensor | float:
        """Position embeddings (length, E) to add, or 0 with rotary embeddings."""
        if self.config.positions == "rotary":
            return 0.0
        if self.learned_positions is not None and self.learned_target_positions is not None:
            learned = self.learned_target_positions if target else self.learned_positions
            return learned.weight[start : start + length]
        table = self._sinusoids
        if start + length > len(table):
            with torch.inference_mode(False):  # the table outlives the inference mode of the caller
                table = self._sinusoidal_table(2 * (start + length)).to(table)
            self._sinusoids = table  # not read below: another thread may replace it with a shorter one
        return table[start : start + length]

    def _embed(self, ids: Tensor, table: nn.Embedding, positions: Tensor | float) -> Tensor:
        """Embeddings (.., E) of ids (..), plus `positions`. Word dropout requires ids (B, T)."""
        words = table(ids) * math.sqrt(self.config.d_model)
        if self.word_dropout.active:
            words = words * self._word_dropout_factors(ids, words)
        return self.dropout(words + positions)  # type: ignore[no-any-return]

    def _word_dropout_factors(self, ids: Tensor, words: Tensor) -> Tensor:
        """(B, T, 1) factors that drop all occurrences of a word in a sentence or none (Gal and Ghahramani, "A
        Theoretically Grounded Application of Dropout in Recurrent Neural Networks", 2016, section 4.2)."""
        first = (ids[:, :, None] == ids[:, None, :]).int().argmax(dim=-1)  # (B, T): its first occurrence
        factors: Tensor = self.word_dropout(words.new_ones(ids.shape)).gather(1, first)
        return factors[..., None]

    def encode(
        self, source: Tensor, source_keep: Tensor, attention_weights: AttentionWeights | None = None
    ) -> Tensor:
        """The encoder output, "memory" (B, S, E), for source ids (B, S) and source_keep (B, S)."""
        x = self._embed(source, self.source_embedding, self.positions(0, source.size(1), target=False))
        keep = source_keep[:, None, None, :]
        weights = None if attention_weights is None else attention_weights.encoder
        for layer in self.encoder:
            x = layer(x, keep, weights)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self,
        target_in: Tensor,
        memory: Tensor,
        source_keep: Tensor,
        attention_weights: AttentionWeights | None = None,
    ) -> Tensor:
        """Hidden states (N, T, E) for target ids (N, T) that start with BOS."""
        table = self.target_embedding or self.source_embedding
        x = self._embed(target_in, table, self.positions(0, target_in.size(1), target=True))
        keep = source_keep[:, None, None, :]
        for layer in self.decoder:
            x = layer(x, memory, keep, attention_weights)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def decode_next(
        self, last: Tensor, cache: KeyValueCache, cross_weights: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states (N, E) for ids (N) of the next position, given a cache of earlier positions.

        The model must be in eval mode. If `cross_weights` is a list, the cross-attention weights (N, H, 1, S)
        of each layer are appended to it.
        """
        position, past_keep_bias = cache.length, cache.extend()
        table = self.target_embedding or self.source_embedding
        x = self._embed(last, table, self.positions(position, 1, target=True))
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, layer_cache, position, past_keep_bias, cache.source_keep_bias, cross_weights)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def start_cache(self, memory: Tensor, source_keep: Tensor, beams: int, max_length: int) -> KeyValueCache:
        """An empty cache for `beams` rows of each sentence, for up to `max_length` positions."""
        layers = []
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            layers.append(LayerCache(*layer.cross_attention.project_memory(memory), beams, max_length))
        return KeyValueCache(layers, source_keep, beams)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight (V, E) and bias (V) that turn hidden states into logits."""
        if self.output_weight is not None:
            return self.output_weight, self.output_bias
        return (self.target_embedding or self.source_embedding).weight, self.output_bias

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (.., V) of hidden states (.., E)."""
        return linear(hidden, *self.projection(), self.packed_projection)

    def projects_in_low_precision(self) -> bool:
        """Whether `project` rounds logits to low precision."""
        packed = self.packed_projection
        return packed is not None and packed.dtype.itemsize < packed.weight.dtype.itemsize

    def project_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits (..) of tokens (..) for hidden states that broadcast to (.., E), never in low precision."""
        weight, bias = self.projection()
        logits = (weight[tokens] * hidden).sum(dim=-1)
        return logits if bias is None else logits + bias[tokens]

    def for_decoding(self, dtype: torch.dtype | None, stays_low: bool | None = None) -> Self:
        """A copy for inference that shares the parameters and has less overhead per call.

        Products with large weights use packed copies of them in `dtype`, made by the first call. None: only
        `project` does, on a CPU, in the type of the parameters. For `stays_low` see `pack`.
        """
        model = copy.deepcopy(self, {id(parameter): parameter for parameter in self.parameters()})
        reduce_call_overhead(model)
        for module in model.modules():
            if isinstance(module, Linear):
                module.packed = pack(module.weight, module.bias, dtype, stays_low)
        weight, bias = self.projection()
        if dtype is None and weight.device.type == "cpu":
            dtype = weight.dtype  # the projection is the largest product; packing it always saves time
        model.packed_projection = pack(weight, bias, dtype, stays_low)
        return model

    def forward(self, source: Tensor, source_keep: Tensor, target_in: Tensor) -> Tensor:
        """Hidden states (B, T, E), which the loss projects to the vocabulary."""
        return self.decode(target_in, self.encode(source, source_keep), source_keep)
