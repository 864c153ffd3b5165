"""The encoder-decoder Transformer. Symbols in shapes: see `mtrain.model`."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.model import ModelConfig
from mtrain.model.encoder import TransformerEncoder, make_attention, make_final_norm
from mtrain.model.layers import FeedForward, Residual
from mtrain.model.loss import LossSums, translation_loss

if TYPE_CHECKING:
    from mtrain.model.incremental import DecodingTransformer


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder output ("memory"), then a feed-forward network."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = make_attention(config, config.positions == "rotary")
        self.cross_attention = make_attention(config)
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.cross_attention_residual = Residual(config), Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        """x (N, T, E), memory (B, S, E), keep (B, 1, 1, S)."""
        keys_values = self.cross_attention.project_memory(memory)
        h = self.self_attention(self.self_attention_residual.before(x), causal=True)
        x = self.self_attention_residual.after(x, h)
        h = self.cross_attention(self.cross_attention_residual.before(x), keys_values, keep)
        x = self.cross_attention_residual.after(x, h)
        h = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, h)


class Transformer(TransformerEncoder):
    """The encoder-decoder Transformer.

    Tied embeddings are one parameter with one name: `target_embedding` is None if it is tied to
    `source_embedding`, and `output_weight` is None if it is tied to the target embedding.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        width, tie = config.d_model, config.tie_embeddings
        self.target_embedding = None if tie == "all" else nn.Embedding(config.target_vocab_size, width)
        vocab = config.target_vocab_size
        self.output_weight = nn.Parameter(torch.empty(vocab, width)) if tie == "none" else None
        self.output_bias = nn.Parameter(torch.zeros(vocab)) if config.output_bias else None
        self.learned_target_positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.learned_target_positions = nn.Embedding(config.max_positions, width)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.decoder_norm = make_final_norm(config)
        self.initialize()

    def initialize(self) -> None:
        """See `TransformerEncoder.initialize`."""
        super().initialize()
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=self.config.d_model**-0.5)

    def decode(self, target_in: Tensor, memory: Tensor, source_keep: Tensor) -> Tensor:
        """Hidden states (N, T, E) for target ids (N, T) that start with BOS."""
        table = self.target_embedding or self.source_embedding
        x = self._embed(target_in, table, self.positions(0, target_in.size(1), self.learned_target_positions))
        keep = source_keep[:, None, None, :]
        for layer in self.decoder:
            x = layer(x, memory, keep)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def embed_next(self, last: Tensor, position: int) -> Tensor:
        """Embeddings (N, E) of target ids (N) at one position."""
        table = self.target_embedding or self.source_embedding
        return self._embed(last, table, self.positions(position, 1, self.learned_target_positions))

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight (V, E) and bias (V) that turn hidden states into logits."""
        if self.output_weight is not None:
            return self.output_weight, self.output_bias
        return (self.target_embedding or self.source_embedding).weight, self.output_bias

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (.., V) of hidden states (.., E)."""
        return F.linear(hidden, *self.projection())

    def for_decoding(
        self, dtype: torch.dtype | None = None, stays_low: bool | None = None, low_projection: bool = True
    ) -> "DecodingTransformer":
        """The model for inference; see `DecodingTransformer`."""
        from mtrain.model.incremental import DecodingTransformer

        return DecodingTransformer(self, dtype, stays_low, low_projection)

    def forward(self, source: Tensor, source_keep: Tensor, target_in: Tensor) -> Tensor:
        """Hidden states (B, T, E), which the loss projects to the vocabulary."""
        return self.decode(target_in, self.encode(source, source_keep), source_keep)

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float, r_drop: float = 0.0) -> LossSums:
        """The loss of hidden states (B, T, E) at labels (B, T); see `translation_loss`."""
        return translation_loss(outputs, *self.projection(), labels, smoothing, r_drop)
