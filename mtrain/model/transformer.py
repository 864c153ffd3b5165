"""The encoder-decoder Transformer. Symbols in shapes: see `mtrain.model`."""

import copy
from typing import Self

import torch
from torch import Tensor, nn

from mtrain.config.model import ModelConfig
from mtrain.kernels.linear import PackedLinear, linear, pack
from mtrain.kernels.module_calls import reduce_call_overhead
from mtrain.model.cache import KeyValueCache, LayerCache
from mtrain.model.encoder import TransformerEncoder, make_attention, make_final_norm
from mtrain.model.layers import FeedForward, Linear, Residual
from mtrain.model.loss import LossSums, translation_loss


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

    def step(
        self,
        x: Tensor,
        cache: LayerCache,
        position: int,
        past_keep_bias: Tensor | None,
        source_keep_bias: Tensor | None,
    ) -> Tensor:
        """`forward` for x (N, E) at one position, given a cache of earlier positions and of the memory."""
        h = self.self_attention_residual.before(x)
        x = self.self_attention_residual.after(
            x, self.self_attention.step(h, cache, position, past_keep_bias)
        )
        h = self.cross_attention_residual.before(x)
        h = self.cross_attention.step_over_memory(h, cache, source_keep_bias)
        x = self.cross_attention_residual.after(x, h)
        h = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, h)


class Transformer(TransformerEncoder):
    """The encoder-decoder Transformer.

    Tied embeddings are one parameter with one name: `target_embedding` is None if it is tied to
    `source_embedding`, and `output_weight` is None if it is tied to the target embedding.
    """

    packed_projection: PackedLinear | None = None

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

    def decode_next(self, last: Tensor, cache: KeyValueCache) -> Tensor:
        """Hidden states (N, E) for ids (N) of the next position, given a cache of earlier positions.

        The model must be in eval mode.
        """
        position, past_keep_bias = cache.length, cache.extend()
        table = self.target_embedding or self.source_embedding
        x = self._embed(last, table, self.positions(position, 1, self.learned_target_positions))
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, layer_cache, position, past_keep_bias, cache.source_keep_bias)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def start_cache(self, memory: Tensor, source_keep: Tensor, beams: int, max_length: int) -> KeyValueCache:
        """An empty cache for `beams` rows of each sentence, for up to `max_length` positions."""
        layers = []
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            attention = layer.cross_attention
            keys_values = attention.keys_and_values(attention.project_memory(memory))
            layers.append(LayerCache(*keys_values, beams, max_length))
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

    def for_decoding(
        self, dtype: torch.dtype | None, stays_low: bool | None = None, low_projection: bool = True
    ) -> Self:
        """A copy for inference that shares the parameters and has less overhead per call.

        Products with large weights use packed copies of them in `dtype`, made by the first call. None: in
        the type of the parameters, for `project` on a CPU and where `pack` requires it. Without
        `low_projection`, `project` uses the type of the parameters in any case. For `stays_low` see `pack`.
        """
        model = copy.deepcopy(self, {id(parameter): parameter for parameter in self.parameters()})
        reduce_call_overhead(model)
        for module in model.modules():
            if isinstance(module, Linear):
                module.packed = pack(module.weight, module.bias, dtype, stays_low)
        weight, bias = self.projection()
        if not low_projection:
            dtype = None
        if dtype is None and weight.device.type == "cpu":
            dtype = weight.dtype  # the projection is the largest product; packing it always saves time
        model.packed_projection = pack(weight, bias, dtype, stays_low)
        return model

    def forward(self, source: Tensor, source_keep: Tensor, target_in: Tensor) -> Tensor:
        """Hidden states (B, T, E), which the loss projects to the vocabulary."""
        return self.decode(target_in, self.encode(source, source_keep), source_keep)

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float, r_drop: float = 0.0) -> LossSums:
        """The loss of hidden states (B, T, E) at labels (B, T); see `translation_loss`."""
        return translation_loss(outputs, *self.projection(), labels, smoothing, r_drop)
