"""The encoder of the Transformer, with its embeddings. Symbols in shapes: see `mtrain.model`."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtrain.config.model import ModelConfig
from mtrain.model.attention import MultiHeadAttention
from mtrain.model.layers import Dropout, FeedForward, Residual
from mtrain.model.loss import LossSums


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each in a residual connection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = make_attention(config, config.positions == "rotary")
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.feed_forward_residual = Residual(config), Residual(config)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (B, S, E), keep (B, 1, 1, S)."""
        h = self.self_attention(self.self_attention_residual.before(x), keep=keep)
        x = self.self_attention_residual.after(x, h)
        h = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, h)


def make_attention(config: ModelConfig, rotary: bool = False) -> MultiHeadAttention:
    """The attention of a layer."""
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


class TransformerEncoder(nn.Module):
    """Token embeddings, positions and encoder layers: what the Transformer and the pair classifier share.

    Training calls a model with the tensors of a batch, and passes what it returns to `loss`.
    """

    _sinusoids: Tensor  # (length, E)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, width = config, config.d_model
        self.source_embedding = nn.Embedding(config.source_vocab_size, width)
        self.learned_positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.learned_positions = nn.Embedding(config.max_positions, width)
        elif config.positions != "rotary":
            self.register_buffer("_sinusoids", torch.empty(0), persistent=False)
            self.make_positions()
        self.dropout, self.word_dropout = Dropout(config.dropout), Dropout(config.word_dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.encoder_norm = make_final_norm(config)

    def initialize(self) -> None:
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

    @abstractmethod
    def forward(self, source: Tensor, source_keep: Tensor, target_in: Tensor) -> Tensor:
        """What `loss` needs, from the tensors of a batch."""

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float, r_drop: float = 0.0) -> LossSums:
        """The loss of the outputs of `forward`, given the labels of the batch."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context manager for evaluation mode. At the end, the model has its previous mode again."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def start_from(self, other: "TransformerEncoder") -> None:
        """Take the weights of another model."""
        self.load_state_dict(other.state_dict())

    def make_positions(self) -> None:
        """Compute the table of sinusoidal positions, which is not saved. It grows when it is too short.

        A model on the meta device has an empty table."""
        if self.config.positions.startswith("sinusoidal") and not self.source_embedding.weight.is_meta:
            self._sinusoids = self._sinusoidal_table(min(self.config.max_positions, 1024))

    def _sinusoidal_table(self, length: int) -> Tensor:
        interleaved = self.config.positions == "sinusoidal_interleaved"
        return sinusoidal_positions(length, self.config.d_model, interleaved)

    def positions(self, start: int, length: int, learned: nn.Embedding | None = None) -> Tensor | float:
        """Position embeddings (length, E) to add, or 0 with rotary embeddings. Of `learned` ones, by default
        those of the source."""
        if self.config.positions == "rotary":
            return 0.0
        if (learned := learned or self.learned_positions) is not None:
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

    def encode(self, source: Tensor, source_keep: Tensor) -> Tensor:
        """The encoder output, "memory" (B, S, E), for source ids (B, S) and source_keep (B, S)."""
        x = self._embed(source, self.source_embedding, self.positions(0, source.size(1)))
        keep = source_keep[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, keep)
        return self.encoder_norm(x)  # type: ignore[no-any-return]


def make_final_norm(config: ModelConfig) -> nn.Module:
    """What follows the last layer: a norm, unless each layer ends in one."""
    return nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
