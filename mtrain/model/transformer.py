"""The encoder-decoder Transformer of Vaswani et al., "Attention Is All You Need", 2017.

Sections are of this paper. Symbols in shapes: see `mtrain.model`. Layers follow sublayers, and the model
comes last. Everything works on tokens (P, E), sequence after sequence; where batches have padding, it is
included. Only attention, positions and word dropout need to know which sequence a token belongs to: see
`mtrain.kernels.sequences`. Attention hides the padding of sources (`mtrain.kernels.attention`). The padding
of targets comes last, so causality hides it, and the loss ignores it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.config.sections.model import ModelConfig, Positions
from mtrain.kernels.attention.dispatch import attention
from mtrain.kernels.cross_entropy import LossSums, projected_cross_entropy
from mtrain.kernels.dropout import Generator, HashKey, dropout
from mtrain.kernels.mixed_linear import linear
from mtrain.kernels.norm import BranchNorm
from mtrain.kernels.precision import widest_float
from mtrain.kernels.sequences import Padded, Sequences

# --------------------------------------------------------------------------------- linear maps and dropout


class Linear(nn.Linear):
    """`nn.Linear` that can also compute only some of its output features."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def slice(self, x: Tensor, start: int, end: int | None = None) -> Tensor:
        """The output features from `start` to `end` only."""
        return linear(x, self.weight[start:end], self.bias[start:end])


class Dropout(nn.Module):
    """Dropout (section 5.4; not in the paper: of words, of attention weights, and in feed-forward networks),
    with a generator that can be seeded separately for each training thread, or a key for masks that are
    hashed."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.generator: Generator = None  # see `mtrain.kernels.dropout`

    @staticmethod
    def seed(model: nn.Module, seed: int) -> None:
        """Make all dropout modules of a model draw from one new generator with the given seed."""
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    @staticmethod
    def use_key(model: nn.Module, key: Tensor) -> None:
        """Make all dropout modules of a model hash their masks from one key (1,) int32, which is on the
        device of the model and may be changed in place."""
        modules = [module for module in model.modules() if isinstance(module, Dropout)]
        for number, module in enumerate(modules):
            module.generator = HashKey(key, torch.full_like(key, number))

    @property
    def active_rate(self) -> float:
        """The rate in training mode, otherwise 0."""
        return self.rate if self.training else 0.0

    def forward(self, x: Tensor, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        """dropout(x), or with `relu` dropout(relu(x)), plus a residual if given."""
        return dropout(x, self.active_rate, self.generator, relu=relu, residual=residual)


# ------------------------------------------------------------------------------------------------ positions


def sinusoidal_positions(length: int, width: int, kind: Positions = "sinusoidal", first: int = 0) -> Tensor:
    """(length, width) table of sin and cos of p / 10000^(2i/width) (section 3.5), for p from `first` on.

    By default, all sines come first, then all cosines; with "sinusoidal_interleaved" they alternate, as in
    the paper. With "sinusoidal_marian", the exponent is i / (width/2 - 1), as in Marian, tensor2tensor and
    fairseq; the slowest frequency is then exactly 1 / 10000.
    """
    steps = width / 2 - 1 if kind == "sinusoidal_marian" else width / 2
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / steps)
    positions = torch.arange(first, first + length, dtype=torch.float64)
    angles = positions[:, None] * frequencies  # (length, width / 2)
    parts = [angles.sin(), angles.cos()]
    alternate = kind == "sinusoidal_interleaved"
    table = torch.stack(parts, dim=-1).flatten(1) if alternate else torch.cat(parts, dim=-1)
    return table.to(torch.get_default_dtype())


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary position embeddings (Su et al., "RoFormer", 2021) to queries or keys x (.., D) at
    `positions` p, which broadcast to (..): coordinates i and i + D/2 turn by p / 10000^(2i/D)."""
    half = x.size(-1) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=widest_float(x.device)) / half)
    angles = positions[..., None] * frequencies  # (.., D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Embed(nn.Module):
    """Token embeddings times sqrt(E) (section 3.4), plus positions (section 3.5), with dropout.

    The embeddings themselves belong to the model, which shares them between source, target and output.
    """

    _sinusoids: Tensor  # (length, E)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.dropout, self.word_dropout = Dropout(config.dropout), Dropout(config.word_dropout)
        self.sinusoidal = config.positions.startswith("sinusoidal")
        if self.sinusoidal:
            self.register_buffer("_sinusoids", torch.empty(0), persistent=False)
            if not self._sinusoids.is_meta:  # a model on the meta device has an empty table
                self.make_positions()

    def make_positions(self) -> None:
        """Compute the table of sinusoidal positions, which is not saved. It grows when it is too short."""
        if self.sinusoidal:
            self._sinusoids = self._table(min(self.config.max_positions, 1024))

    def _table(self, length: int) -> Tensor:
        config = self.config
        return sinusoidal_positions(length, config.d_model, config.positions, config.first_position)

    def positions(self, start: int, length: int, learned: nn.Embedding | None) -> Tensor | None:
        """Embeddings (length, E) of the positions from `start` on: learned ones if the model has them. None
        if they are rotary, which attention applies."""
        if self.config.positions == "rotary":
            return None
        if learned is not None:
            return learned.weight[start : start + length]
        table = self._sinusoids
        if start + length > len(table):
            with torch.inference_mode(False):  # or else training could not use the table later
                table = self._table(2 * (start + length)).to(table)
            self._sinusoids = table  # returned below is the local one: another thread may replace this one
        return table[start : start + length]

    def forward(
        self,
        ids: Tensor,
        sequences: Sequences,
        embedding: nn.Embedding,
        positions: Tensor | None,
        dropouts: Iterable[nn.Module] | None = None,
    ) -> Tensor:
        """(P, E) for ids (P) and embeddings of positions; see `Padded.add`. `dropouts` replace `dropout` and
        `word_dropout`."""
        drop, drop_words = dropouts or (self.dropout, self.word_dropout)
        x = embedding(ids) * math.sqrt(self.config.d_model)
        if drop_words.active_rate:
            # All occurrences of a word in a sentence are dropped, or none (Gal and Ghahramani, "A
            # Theoretically Grounded Application of Dropout in Recurrent Neural Networks", 2016, section 4.2).
            factors = drop_words(x.new_ones(ids.shape))
            x = x * factors[sequences.first_occurrences(ids)][:, None]
        if positions is not None:
            x = sequences.add(x, positions)
        return drop(x)  # type: ignore[no-any-return]


def make_learned_positions(config: ModelConfig) -> nn.Embedding | None:
    """Embeddings of positions that are learned, if the model has any."""
    return nn.Embedding(config.max_positions, config.d_model) if config.positions == "learned" else None


# ------------------------------------------------------------------------------------------------ sublayers


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2).

        MultiHead(Q, K, V) = Concat(head_1, .., head_H) W^O
        head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i)
        Attention(Q, K, V) = softmax(Q K^T / sqrt(D)) V    (section 3.2.1)

    One matrix projects queries, keys and values for all heads. Self-attention uses it as a whole.
    Cross-attention uses two slices: one for queries, one for keys and values.
    """

    def __init__(self, d_model: int, heads: int, rotary: bool = False, dropout: float = 0.0):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.query_key_value = Linear(d_model, 3 * d_model)  # W^Q, W^K, W^V, each by heads
        self.output = Linear(d_model, d_model)  # W^O
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(
        self,
        x: Tensor,
        queries: Sequences,
        memory: Tensor | None = None,
        keys: Sequences | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Without `memory`, self-attention (N*T, E) of x (N*T, E). With `memory` (B*S, E), the encoder output
        of the sequences `keys`, queries are from x, keys and values from `memory`; if N > B, N / B rows of x
        in turn share a sentence. With `causal`, each position attends to itself and earlier positions.
        """
        width, keys_values = x.size(-1), None
        if memory is None:
            projected = self.query_key_value(x)  # (P, 3 * E)
        else:
            projected = self.query_key_value.slice(x, 0, width)  # (P, E)
            keys_values = self.query_key_value.slice(memory, width)  # (B*S, 2 * E)
        if self.rotary:
            projected = self._rotated(projected, queries)
        keys = queries if keys is None else keys
        rate, generator = self.dropout.active_rate, self.dropout.generator
        attended = attention(projected, keys_values, self.heads, queries, keys, causal, rate, generator)
        return self.output(attended)  # type: ignore[no-any-return]

    def _rotated(self, projected: Tensor, sequences: Sequences) -> Tensor:
        """The queries, keys and values (P, 3 * E) with rotated queries and keys."""
        width = self.output.in_features
        by_head = projected[:, : 2 * width].reshape(len(projected), 2 * self.heads, -1)  # queries, then keys
        positions = sequences.positions(projected.device)[:, None]  # (T, 1)
        rotated = rotate(sequences.by_row(by_head), positions).flatten(0, 1).flatten(1)  # (P, 2 * E)
        return torch.cat([rotated, projected[:, 2 * width :]], dim=-1)


def make_attention(config: ModelConfig, rotary: bool = False) -> MultiHeadAttention:
    """The attention of a layer."""
    return MultiHeadAttention(config.d_model, config.heads, rotary, config.attention_dropout)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Position-wise feed-forward network (section 3.3): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2.

    Other activations may replace max(0, .). With "swiglu", one half of the first map's output gates the other
    (Shazeer, "GLU Variants Improve Transformer", 2020).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = _ACTIVATIONS["silu" if self.gated else config.activation]
        self.inner = Linear(config.d_model, config.ffn_dim * (2 if self.gated else 1))
        self.outer = Linear(config.ffn_dim, config.d_model)
        rate = config.activation_dropout
        self.dropout = Dropout(config.dropout if rate is None else rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.activate(self.inner(x)))  # type: ignore[no-any-return]

    def activate(self, x: Tensor) -> Tensor:
        """The activation of the output of the first map, and dropout."""
        if self.activation is F.relu:
            return self.dropout(x, relu=True)  # type: ignore[no-any-return]
        if not self.gated:
            return self.dropout(self.activation(x))  # type: ignore[no-any-return]
        gate, x = x.chunk(2, dim=-1)
        return self.dropout(self.activation(gate) * x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A residual connection around a sublayer.

    "post"  x = LayerNorm(x + Dropout(Sublayer(x)))    (sections 3.1 and 5.4)
    "pre"   x = x + Dropout(Sublayer(LayerNorm(x)))    (Xiong et al., "On Layer Normalization in the
                                                       Transformer Architecture", 2020)
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = (BranchNorm if self.pre else nn.LayerNorm)(config.d_model)
        self.dropout = Dropout(config.dropout)

    def around(self, x: Tensor, sublayer: Callable[..., Tensor], *inputs: Any, **settings: Any) -> Tensor:
        """The sublayer, called with its input and what else it needs, in the residual connection."""
        h, x = self.before(x)
        return self.after(x, sublayer(h, *inputs, **settings))

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the sublayer, and x itself."""
        return self.norm(x) if self.pre else (x, x)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """x + Dropout(y) for the output y of the sublayer, normalized with "post"."""
        added = self.dropout(y, residual=x)
        return added if self.pre else self.norm(added)  # type: ignore[no-any-return]


def make_final_norm(config: ModelConfig) -> nn.Module:
    """What follows the last layer: a norm, unless each layer ends in one."""
    return nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()


# --------------------------------------------------------------------------------------- layers (section 3.1)


class EncoderLayer(nn.Module):
    """The encoder's layer: SelfAttention(x), then FFN(x), each in a residual connection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = make_attention(config, config.positions == "rotary")
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.feed_forward_residual = Residual(config), Residual(config)

    def forward(self, x: Tensor, sources: Sequences) -> Tensor:
        """x (P, E) of the source tokens."""
        x = self.self_attention_residual.around(x, self.self_attention, sources)
        return self.feed_forward_residual.around(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """The decoder's layer: CausalSelfAttention(x), then CrossAttention(x, memory), with queries from x, and
    keys and values from the encoder output ("memory"), then FFN(x), each in a residual connection."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = make_attention(config, config.positions == "rotary")
        self.cross_attention = make_attention(config)
        self.feed_forward = FeedForward(config)
        self.self_attention_residual, self.cross_attention_residual = Residual(config), Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(self, x: Tensor, targets: Sequences, memory: Tensor, sources: Sequences) -> Tensor:
        """x (N*T, E) of the target tokens, memory (B*S, E) of the source tokens."""
        x = self.self_attention_residual.around(x, self.self_attention, targets, causal=True)
        x = self.cross_attention_residual.around(x, self.cross_attention, targets, memory, sources)
        return self.feed_forward_residual.around(x, self.feed_forward)


# ------------------------------------------------------------------------------------------------ the model


class Encoder(nn.Module):
    """The encoder with its embeddings: the first part of a Transformer and of a pair classifier."""

    encoder: Sequence[EncoderLayer]  # an nn.ModuleList, whose type does not say what it contains

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(config.source_vocab_size, config.d_model)
        self.learned_positions = make_learned_positions(config)
        self.embed = Embed(config)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))  # type: ignore[assignment]
        self.encoder_norm = make_final_norm(config)

    def encode(self, source: Tensor, source_keep: Tensor) -> Tensor:
        """The encoder output, "memory" (B, S, E), for source ids (B, S) and their mask (B, S)."""
        sources = Padded.of(source, source_keep)
        return sources.by_row(self.encode_tokens(source.flatten(), sources))

    def encode_tokens(self, ids: Tensor, sources: Sequences) -> Tensor:
        """The encoder output (P, E) for source ids (P)."""
        x = self.embed(ids, sources, self.source_embedding, self.positions_of(ids, sources))
        for layer in self.encoder:
            x = layer(x, sources)
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def positions_of(self, ids: Tensor, sources: Sequences) -> Tensor | None:
        """Embeddings of the positions of source ids (P); see `Padded.add`."""
        return self.embed.positions(0, sources.longest, self.learned_positions)


class Transformer(Encoder):
    """The encoder-decoder Transformer.

    Tied embeddings (section 3.4) are one parameter with one name: `target_embedding` is None if it is tied to
    `source_embedding`, and `output_weight` is None if it is tied to the target embedding.
    """

    decoder: Sequence[DecoderLayer]

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        tie, width, vocab = config.tie_embeddings, config.d_model, config.target_vocab_size
        self.target_embedding = None if tie == "all" else nn.Embedding(vocab, width)
        self.output_weight = nn.Parameter(torch.empty(vocab, width)) if tie == "none" else None
        self.output_bias = nn.Parameter(torch.zeros(vocab)) if config.output_bias else None
        self.learned_target_positions = make_learned_positions(config)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))  # type: ignore[assignment]
        self.decoder_norm = make_final_norm(config)
        initialize(self)
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=width**-0.5)
        if config.norm == "post":
            scale_branches(self)
        # Masks that are hashed differ only between modules, so the targets need modules of their own. These
        # come last, so that the other masks stay as in earlier versions.
        self.target_dropouts = nn.ModuleList([Dropout(config.dropout), Dropout(config.word_dropout)])

    def forward(self, source: Tensor, sources: Sequences, target_in: Tensor, targets: Sequences) -> Tensor:
        """Hidden states (P, E), which the loss projects to the vocabulary, for the source ids and the target
        ids (P) of some pairs, of which each target starts with BOS."""
        return self.decode_tokens(target_in, targets, self.encode_tokens(source, sources), sources)

    def decode(self, target_in: Tensor, memory: Tensor, source_keep: Tensor) -> Tensor:
        """Hidden states (N, T, E) of all positions of target ids (N, T) that start with BOS, N / B for each
        sentence."""
        # The targets need no mask: causality hides padding on the right, and the loss ignores it.
        targets, sources = Padded.of(target_in), Padded.of(memory, source_keep)
        hidden = self.decode_tokens(target_in.flatten(), targets, memory.flatten(0, 1), sources)
        return targets.by_row(hidden)

    def decode_tokens(self, ids: Tensor, targets: Sequences, memory: Tensor, sources: Sequences) -> Tensor:
        """Hidden states (N*T, E) for target ids (N*T), given the encoder output (B*S, E)."""
        positions = self.embed.positions(0, targets.longest, self.learned_target_positions)
        embedding = self.target_embedding or self.source_embedding
        x = self.embed(ids, targets, embedding, positions, self.target_dropouts)
        for layer in self.decoder:
            x = layer(x, targets, memory, sources)
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    # Output

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight (V, E) and bias (V) that turn hidden states into logits."""
        if self.output_weight is not None:
            return self.output_weight, self.output_bias
        return (self.target_embedding or self.source_embedding).weight, self.output_bias

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (.., V) of hidden states (.., E)."""
        return F.linear(hidden, *self.projection())

    def loss(self, hidden: Tensor, labels: Tensor, smoothing: float, *_: object) -> LossSums:
        """The loss of hidden states (P, E) at P labels; see `projected_cross_entropy`. Further arguments,
        which the loss of a classifier needs, are not used."""
        return projected_cross_entropy(hidden, *self.projection(), labels.flatten(), smoothing)

    def start_from(self, other: nn.Module) -> None:
        """Take the weights of another model."""
        self.load_state_dict(other.state_dict())


def initialize(model: nn.Module) -> None:
    """Xavier-uniform projections (Glorot and Bengio 2010), zero biases, embeddings of variance 1/E."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):  # three square matrices, not one wide one
            for part in module.query_key_value.weight.data.chunk(3):
                nn.init.xavier_uniform_(part)


def scale_branches(model: Transformer) -> None:
    """Reduce the initial weights of sublayers as in DeepNet (Wang et al., "DeepNet: Scaling Transformers to
    1,000 Layers", 2022, table 1).

    It computes LayerNorm(a x + Sublayer(x)), and multiplies the initial weights of values, outputs and
    feed-forward networks by b. This is LayerNorm(x + Sublayer(x) / a), so the last weights include 1 / a.
    """
    n, m = len(model.encoder), len(model.decoder)
    product = (n**4 * m) ** (1 / 16)
    for layers, a, b in (
        (model.encoder, 0.81 * product, 0.87 / product),
        (model.decoder, (3 * m) ** 0.25, (12 * m) ** -0.25),
    ):
        for module in chain.from_iterable(layer.modules() for layer in layers):
            if isinstance(module, MultiHeadAttention):
                module.query_key_value.weight.data.chunk(3)[2].mul_(b)  # values
                module.output.weight.data.mul_(b / a)
            elif isinstance(module, FeedForward):
                module.inner.weight.data.mul_(b)
                module.outer.weight.data.mul_(b / a)
