"""The encoder-decoder Transformer: embed, encode, decode, project. Letters in shapes: see `mtrain.model`."""

import copy
import math
from typing import Self

import torch
from torch import Tensor, nn

from mtrain.config.schema import ModelConfig
from mtrain.model.attention import MultiHeadAttention
from mtrain.model.cache import KeyValueCache, LayerCache
from mtrain.model.dropout import Dropout
from mtrain.model.layers import DecoderLayer, EncoderLayer
from mtrain.model.linear import Linear, Low, linear


def sinusoidal_positions(length: int, width: int, interleaved: bool = False) -> Tensor:
    """(length, width) table of sin and cos of p / 10000^(2i/width) (Vaswani et al. 2017, section 3.5): all
    sines, then all cosines, as Marian lays them, or alternating, as in the paper."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates  # (length, width / 2)
    parts = [angles.sin(), angles.cos()]
    table = torch.stack(parts, dim=-1).flatten(1) if interleaved else torch.cat(parts, dim=-1)
    return table.to(torch.get_default_dtype())


class Transformer(nn.Module):
    """Tied embeddings are one parameter under one name: `target_embedding` and `output_weight` are None where
    they are the same as the one before them."""

    _sinusoids: Tensor
    low_projection: Low | None = None

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
        pre = config.norm == "pre"  # the last residual sum has not been normalised yet
        self.encoder_norm: nn.Module = nn.LayerNorm(width) if pre else nn.Identity()
        self.decoder_norm: nn.Module = nn.LayerNorm(width) if pre else nn.Identity()
        self._initialise()

    def _initialise(self) -> None:
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
        """Compute the table of sinusoidal positions, which no file holds; it grows when it is too short."""
        if self.config.positions.startswith("sinusoidal"):
            self._sinusoids = self._sinusoidal_table(min(self.config.max_positions, 1024))

    def _sinusoidal_table(self, length: int) -> Tensor:
        interleaved = self.config.positions == "sinusoidal_interleaved"
        return sinusoidal_positions(length, self.config.d_model, interleaved)

    def positions(self, start: int, length: int, target: bool) -> Tensor | float:
        """(length, E) to add to embeddings, or 0 where attention rotates instead."""
        if self.config.positions == "rotary":
            return 0.0
        if self.learned_positions is not None and self.learned_target_positions is not None:
            learned = self.learned_target_positions if target else self.learned_positions
            return learned.weight[start : start + length]
        table = self._sinusoids
        if start + length > len(table):
            with torch.inference_mode(False):  # it outlives the decoding that asked for it
                table = self._sinusoidal_table(2 * (start + length)).to(table)
            self._sinusoids = table  # another thread may put a shorter one there, but this one is ours
        return table[start : start + length]

    def _embed(self, ids: Tensor, table: nn.Embedding, positions: Tensor | float) -> Tensor:
        """Ids (..) as (.., E), with `positions`, which broadcast, added. With word dropout, ids (B, T)."""
        words = table(ids) * math.sqrt(self.config.d_model)
        if self.word_dropout.active:
            words = words * self._kept_words(ids, words)
        return self.dropout(words + positions)  # type: ignore[no-any-return]

    def _kept_words(self, ids: Tensor, words: Tensor) -> Tensor:
        """(B, T, 1) factors that drop a word in all its places in a sentence or in none (Gal and
        Ghahramani, "A Theoretically Grounded Application of Dropout in Recurrent Neural Networks", 2016,
        section 4.2)."""
        first = (ids[:, :, None] == ids[:, None, :]).int().argmax(dim=-1)  # (B, T): first place of each word
        factors: Tensor = self.word_dropout(words.new_ones(ids.shape)).gather(1, first)
        return factors[..., None]

    def encode(self, source: Tensor, source_keep: Tensor) -> Tensor:
        """Memory (B, S, E) of source ids (B, S); `source_keep` (B, S) is True at tokens, False at padding."""
        x = self._embed(source, self.source_embedding, self.positions(0, source.size(1), target=False))
        mask = source_keep[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self, target_in: Tensor, memory: Tensor, source_keep: Tensor, weights: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states (N, T, E) of target ids (N, T) that start with BOS.

        If `weights` is a list, each layer's cross-attention weights (N, H, T, S) are appended to it.
        """
        table = self.target_embedding or self.source_embedding
        x = self._embed(target_in, table, self.positions(0, target_in.size(1), target=True))
        mask = source_keep[:, None, None]
        for layer in self.decoder:
            x = layer(x, memory, mask, weights)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def decode_next(self, last: Tensor, cache: KeyValueCache, weights: list[Tensor] | None = None) -> Tensor:
        """Hidden states (N, E) of the target ids (N) that follow what was decoded so far with a cache, by a
        model in eval mode. For `weights`, of which T is 1, see `decode`."""
        at, past = cache.length, cache.extend()
        table = self.target_embedding or self.source_embedding
        x = self._embed(last, table, self.positions(at, 1, target=True))
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.continued(x, layer_cache, at, past, cache.source, weights)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def start_cache(self, memory: Tensor, source_keep: Tensor, beams: int, max_length: int) -> KeyValueCache:
        """An empty cache for `beams` rows of each sentence, up to `max_length` target positions."""
        layers = []
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            layers.append(LayerCache(layer.cross_attention.project_memory(memory), beams, max_length))
        return KeyValueCache(layers, source_keep, beams)

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight (V, E) and bias (V) that turn hidden states into logits."""
        if self.output_weight is not None:
            return self.output_weight, self.output_bias
        return (self.target_embedding or self.source_embedding).weight, self.output_bias

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (.., V) of hidden states (.., E)."""
        return linear(hidden, *self.projection(), self.low_projection)

    def projects_roughly(self, hidden: Tensor) -> bool:
        """Whether `project` would round the logits of hidden states to fewer bits."""
        return self.low_projection is not None and self.low_projection.is_worth(hidden)

    def project_to(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits (..) of tokens (..), behind hidden states that broadcast to (.., E), never rounded."""
        weight, bias = self.projection()
        logits = (weight[tokens] * hidden).sum(dim=-1)
        return logits if bias is None else logits + bias[tokens]

    def for_decoding(self, dtype: torch.dtype | None) -> Self:
        """A copy of the same parameters that is quick to call, and multiplies large matrices in `dtype` by
        copies of them, made at their first use; None: as they are."""
        model = copy.deepcopy(self, {id(parameter): parameter for parameter in self.parameters()})
        for module in model.modules():
            # Python finds these before it asks PyTorch's __getattr__, which takes a tenth of a short step.
            module.__dict__.update(module._parameters | module._modules)
            if isinstance(module, Linear) and dtype is not None:
                module.low = Low(module.weight, module.bias, dtype)
        model.low_projection = None if dtype is None else Low(*self.projection(), dtype)
        return model

    def forward(self, source: Tensor, source_keep: Tensor, target_in: Tensor) -> Tensor:
        """Hidden states (B, T, E), for the loss to project."""
        return self.decode(target_in, self.encode(source, source_keep), source_keep)
