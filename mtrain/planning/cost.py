"""What a training step costs: parameters, floating-point operations and memory, as formulas of the sizes.

A FLOP is a multiplication or an addition. As usual, only matrix products count (Kaplan et al., "Scaling Laws
for Neural Language Models", 2020, section 2.1); the gradient of each of the two factors takes as many as the
product, so a step takes three times as many as its forward pass. Memory is counted tensor by tensor, as in
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.

The model on the meta device cannot replace the formulas: it saves other tensors than on a GPU, because the
meta device has no autocast and no fused attention, and its dropout masks are fp32.

Symbols: see `mtrain.model`; F is the width of the feed-forward network.
"""

import re
from functools import partial
from typing import NamedTuple

from mtrain.checkpoint.tensors import model_without_weights
from mtrain.config.sections.model import ModelConfig
from mtrain.kernels.attention.eager import padded_keys, suits_eager_kernel
from mtrain.kernels.cross_entropy import chunk_rows
from mtrain.planning.hardware import Hardware

FP32 = 4  # bytes
_ID = 8  # bytes of a token id


class Shape(NamedTuple):
    """The size of a micro-batch. Tokens include padding."""

    sentences: int
    source: int  # tokens of all sentences
    target: int

    @classmethod
    def of_lengths(cls, sentences: int, source: int, target: int) -> "Shape":
        """`sentences` pairs, padded to the lengths `source` and `target`."""
        return cls(sentences, sentences * source, sentences * target)

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of source and target."""
        return round(self.source / self.sentences), round(self.target / self.sentences)

    def repeated(self, times: int) -> "Shape":
        """The shape with each sentence `times` times, as in R-Drop."""
        return Shape(*(times * size for size in self))


# ------------------------------------------------------------------------------------------------- parameters


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """The number of parameters of each part of a model, and in total. Tied embeddings count once.

    The parts are the embeddings of both languages and of learned positions, with a tied output projection;
    the encoder; the decoder; and the projection: its bias, and its weight unless tied.
    """
    counts = {"embeddings": 0, "encoder": 0, "decoder": 0, "projection": 0}
    parts = {"encoder": "encoder", "decoder": "decoder", "output": "projection", "classifier": "projection"}
    for name, parameter in model_without_weights(config).named_parameters():
        first = re.split("[._]", name)[0]  # of `encoder.0.norm.weight` or `encoder_norm.weight`, for example
        counts[parts.get(first, "embeddings")] += parameter.numel()
    return {**counts, "total": sum(counts.values())}


def _linear_parameters(config: ModelConfig, attentions: int) -> int:
    """Parameters of the linear maps of a layer that has some attentions, and a feed-forward network."""
    width, inner = config.d_model, config.ffn_dim * (_products_of_feed_forward(config) - 1)
    return attentions * 4 * width * (width + 1) + inner * (width + 1) + (config.ffn_dim + 1) * width


def _products_of_feed_forward(config: ModelConfig) -> int:
    """The number of matrices (E, F) in a feed-forward network."""
    return 3 if config.activation == "swiglu" else 2


# ------------------------------------------------------------------------------------------------------ FLOPs


def flops_of(config: ModelConfig, shape: Shape) -> int:
    """Floating-point operations of the matrix products of a micro-batch, forward and backward.

    Causal attention is counted in full. The recomputation in the backward pass of fused attention is not
    counted.
    """
    width, lengths = config.d_model, shape.lengths
    square, feed_forward = width**2, _products_of_feed_forward(config) * width * config.ffn_dim
    encoder = shape.source * (4 * square + feed_forward + 2 * width * lengths[0])
    decoder = shape.target * (6 * square + feed_forward + 2 * width * sum(lengths))
    decoder += shape.source * 2 * square  # keys and values
    classes = 1 if config.is_classifier else config.target_vocab_size
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return 3 * 2 * (layers + shape.target * width * classes)


# ----------------------------------------------------------------------------------------------------- memory


class TrainingDevice(NamedTuple):
    """How a device trains."""

    hardware: Hardware
    precision: str  # fp32, bf16 or fp16
    workers: int = 1  # threads, each with gradients and activations of its own

    @property
    def is_low(self) -> bool:
        """Whether products are in lower precision than weights."""
        return self.precision != "fp32"

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return FP32 // 2 if self.is_low else FP32

    def mask_bytes(self, rate: float, number: int) -> int:
        """Bytes of an element of a dropout mask for numbers of `number` bytes. On a CPU it has their type; on
        a GPU it is hashed, and not stored."""
        return number if rate and self.hardware.on_cpu else 0


def activation_bytes(config: ModelConfig, shape: Shape, device: TrainingDevice) -> int:
    """Bytes that the forward pass of a micro-batch saves for the backward pass.

    They include copies of the weights in low precision, and the gradients that the loss computes early.
    """
    _, source, target = shape
    longest_source, longest_target = shape.lengths
    number, width = device.product_bytes, config.d_model
    mask = device.mask_bytes(config.dropout, FP32) * width
    norm = FP32 * (width + 2)  # its input, a mean and a standard deviation
    # Per token: a norm, the input of the first product, and dropout.
    residual = norm + number * width + mask
    embedding = _ID + mask + (norm if config.norm == "pre" else 0)  # with the norm after the last layer

    def layer(tokens: int, attentions: int) -> int:
        """Bytes of a layer with a number of attentions, without the attentions themselves."""
        weights = number * _linear_parameters(config, attentions) if device.is_low else 0
        return tokens * ((attentions + 1) * residual + _feed_forward_bytes(config, device)) + weights

    encoder = layer(source, 1) + _attention_bytes(config, device, source, source, longest_source)
    decoder = layer(target, 2) + _attention_bytes(config, device, target, target, longest_target)
    cross = partial(_attention_bytes, config, device, target, source, longest_source)
    decoder += cross()
    memories = config.decoder_layers if device.is_low else 1  # inputs of the projections of the memory
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    embeddings = (source + target) * embedding + memories * number * source * width
    if config.alignment_head:  # whose loss needs the weights of the last layer
        layers += cross(explicit=True) - cross()
    return layers + embeddings + loss_gradient_bytes(config, shape)


def _feed_forward_bytes(config: ModelConfig, device: TrainingDevice) -> int:
    """Bytes per token that a feed-forward network saves: what its activation function saves, its dropout, and
    the input of its second product."""
    rate = config.dropout if config.activation_dropout is None else config.activation_dropout
    activation = {"relu": 1, "gelu": 1, "silu": 1, "swiglu": 3}[config.activation]
    number = device.product_bytes
    if config.activation == "relu":
        # Saves only its result, after dropout, which is the input of the product.
        return config.ffn_dim * number
    return config.ffn_dim * ((activation + 1) * number + device.mask_bytes(rate, number))


def _attention_bytes(
    config: ModelConfig, device: TrainingDevice, queries: int, keys: int, length: int, explicit: bool = False
) -> int:
    """Bytes that attention of `queries` tokens over `keys` tokens, `length` in each sentence, saves: queries,
    keys, values, and the input of the output projection; weights or their normalizers, according to the
    kernel that `mtrain.kernels.attention` chooses, which is the `explicit` one if it has to."""
    number, width, on_cpu = device.product_bytes, config.d_model, device.hardware.on_cpu
    normalizers, output = FP32 * config.heads * queries, number * queries * width
    projected = FP32 if on_cpu else number  # on a CPU, attention is computed in fp32
    if explicit or (on_cpu and config.attention_dropout):
        copies = 3 if config.attention_dropout else 1  # weights before and after dropout, and its mask
        return projected * (queries + 2 * keys) * width + output + copies * normalizers * length
    if on_cpu and suits_eager_kernel(length, width // config.heads):
        keys, length = keys * padded_keys(length) // length, padded_keys(length)
        return projected * (queries + 2 * keys) * width + output + normalizers * length
    converted = FP32 * queries * width if on_cpu and device.is_low else 0
    return projected * (queries + 2 * keys) * width + output + normalizers + converted


def loss_gradient_bytes(config: ModelConfig, shape: Shape) -> int:
    """Bytes of the gradients that the forward pass of the loss computes: of the hidden states, and of the
    weight and the bias of the projection. The loss of a pair classifier computes no gradients."""
    if config.is_classifier:
        return 0
    numbers = (shape.target + config.target_vocab_size) * config.d_model
    return FP32 * (numbers + (config.target_vocab_size if config.output_bias else 0))


def loss_workspace_bytes(config: ModelConfig, shape: Shape, device: TrainingDevice) -> int:
    """Bytes that the loss needs for a moment, besides the gradients that it saves: logits and their
    gradients, of a chunk of tokens at a time; or copies of the gradients at the start of the backward
    pass."""
    if config.is_classifier:  # a few numbers for each pair
        return 0
    number, vocabulary = device.product_bytes, config.target_vocab_size
    rows = min(shape.target, chunk_rows("cpu" if device.hardware.on_cpu else "cuda", vocabulary))
    if device.hardware.on_cpu:
        # The gradient replaces the logits. The gradient of the bias needs a copy. R-Drop needs little more.
        logit = 2 * FP32 if config.output_bias else number
    else:
        # Logits and their softmax, which becomes the gradient. In low precision, also a copy of the logits or
        # of R-Drop's gradient, and another copy if there is a bias.
        logit = number + FP32 * (1 + device.is_low * (1 + config.output_bias))
    weight = vocabulary * config.d_model
    # A copy of the weight in low precision, and the chunk's share of the gradient of the weight.
    products = number * weight * (2 if device.is_low else 1)
    hidden = FP32 * shape.target * config.d_model
    return max(rows * vocabulary * logit + products + hidden, loss_gradient_bytes(config, shape))
