"""Decoding one position at a time, with packed weights. Symbols in shapes: see `mtrain.model`.

A step of a layer is the layer of `mtrain.model.transformer` for one position of each row, except that
attention reads keys and values from a cache:

    start_cache  stores keys and values of the encoder output, once for the K beams of a sentence
    decode_next  adds one position: stores its keys and values, and attends with K queries for each sentence
    reorder      (of the cache) lets each beam continue another one by changing a mask; now and then, keys and
                 values that no beam needs are removed
"""

import copy
from collections.abc import Sequence
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.kernels import undocumented
from mtrain.kernels.attention import dispatch as kernels
from mtrain.kernels.linear import PackedLinear, linear, pack
from mtrain.kernels.sequences import Padded
from mtrain.model.cache import KeyValueCache, LayerCache
from mtrain.model.transformer import Dropout, FeedForward, Linear, MultiHeadAttention, Transformer, rotate


class DecodingTransformer:
    """A Transformer for inference, which shares the parameters of the original (`transformer`).

    Products with large weights use packed copies of them in `dtype`, made by the first call. If it is None,
    only `project` on a CPU, and maps for which `pack` requires it, use packed copies, in the type of the
    parameters. Without `low_projection`, `project` uses that type in any case.
    """

    def __init__(self, model: Transformer, dtype: torch.dtype | None = None, low_projection: bool = True):
        self.config = model.config
        self.transformer, self.packed = model, _packed_copy(model, dtype)
        self.weight, self.bias = model.projection()
        if not low_projection:
            dtype = None
        if dtype is None and self.weight.device.type == "cpu":
            dtype = self.weight.dtype  # the projection is the largest product; `pack` decides
        self._projection = pack(self.weight, self.bias, dtype)

    def encode(self, source: Tensor, source_keep: Tensor) -> Tensor:
        """See `Transformer.encode`."""
        return self.packed.encode(source, source_keep)

    def decode(self, target_in: Tensor, memory: Tensor, source_keep: Tensor) -> Tensor:
        """Hidden states of all positions of given targets; see `Transformer.decode`."""
        return self.packed.decode(target_in, memory, source_keep)

    def start_cache(self, memory: Tensor, source_keep: Tensor, beams: int, max_length: int) -> KeyValueCache:
        """An empty cache for `beams` rows of each sentence, for up to `max_length` positions, given the
        encoder output (B, S, E) and its mask (B, S)."""
        layers = [
            LayerCache(*memory_keys_and_values(layer.cross_attention, memory), beams, max_length)
            for layer in self.packed.decoder
        ]
        return KeyValueCache(layers, source_keep, beams)

    def decode_next(self, last: Tensor, cache: KeyValueCache) -> Tensor:
        """Hidden states (N, E) for ids (N) of the next position, given a cache of earlier positions.

        `recording` gets only the attention maps of cross-attention, (N, H, 1, S) for each layer.
        """
        position = cache.length
        past_keep_bias = cache.extend()
        model, embedding = self.packed, self.packed.target_embedding or self.packed.source_embedding
        positions = model.embed.positions(position, 1, model.learned_target_positions)
        x = model.embed(last, Padded(len(last), 1), embedding, positions)
        for layer, layer_cache in zip(model.decoder, cache.layers, strict=True):
            h, x = layer.self_attention_residual.before(x)
            h = self_attention_step(layer.self_attention, h, layer_cache, position, past_keep_bias)
            x = layer.self_attention_residual.after(x, h)
            h, x = layer.cross_attention_residual.before(x)
            h = cross_attention_step(layer.cross_attention, h, layer_cache, cache.source_keep_bias)
            x = layer.cross_attention_residual.after(x, h)
            x = layer.feed_forward_residual.around(x, layer.feed_forward)
        return model.decoder_norm(x)  # type: ignore[no-any-return]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (.., V) of hidden states (.., E)."""
        return linear(hidden, self.weight, self.bias, self._projection)

    def projects_in_low_precision(self) -> bool:
        """Whether `project` rounds logits to low precision."""
        packed = self._projection
        return packed is not None and packed.dtype.itemsize < packed.weight.dtype.itemsize

    @cached_property
    def low_weight(self) -> Tensor:
        """The weight (V, E) of the projection in the type of what the linear maps of the decoder return."""
        output = self.packed.decoder[0].cross_attention.output
        return self.weight.detach().to(output.forward(self.weight[:1]).dtype)

    def project_tokens(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits (..) of tokens (..) for hidden states that broadcast to (.., E), never in low precision."""
        logits = (self.weight[tokens] * hidden).sum(dim=-1)
        return logits if self.bias is None else logits + self.bias[tokens]


Models = Sequence[DecodingTransformer]  # one, or an ensemble


# ------------------------------------------------------------------------------------ attention of a step


def self_attention_step(
    attention: MultiHeadAttention, x: Tensor, cache: LayerCache, position: int, past_keep_bias: Tensor | None
) -> Tensor:
    """Causal self-attention (N, E) of x (N, E) at one position, given the cache of earlier positions.

    Appends keys and values of x to the cache. For `past_keep_bias` see `KeyValueCache.extend`.
    """
    projected = _by_head(attention.query_key_value.forward(x), 3, attention.heads, cache.sentences)
    queries, keys_values = projected[0], projected[1:]  # (B, H, K, D), (2, B, H, K, D)
    if attention.rotary:
        queries, new_keys = rotate(projected[:2], torch.full((), position, device=x.device))
        keys_values = torch.stack([new_keys, projected[2]])
    keys, values = cache.append(keys_values)
    attended, _ = kernels.cached_attention(queries, keys, values, past_keep_bias)
    return _output(attention, attended, queries)


def cross_attention_step(
    attention: MultiHeadAttention, x: Tensor, cache: LayerCache, source_keep_bias: Tensor | None
) -> Tensor:
    """Attention (N, E) of x (N, E), one position of each row, to the encoder output in the cache."""
    queries = attention.query_key_value.slice(x, 0, x.size(-1))
    queries = _by_head(queries, 1, attention.heads, cache.sentences)[0]  # (B, H, K, D)
    keys, values = cache.memory_keys, cache.memory_values
    attended, weights = kernels.cached_attention(queries, keys, values, source_keep_bias)
    if (maps := kernels.recorder(cross=True)) is not None:
        weights = weights[:, :, : cache.source_length].reshape(*queries.shape[:-1], -1)  # (B, H, K, S)
        maps.append(kernels.weights_by_row(weights, len(x)))
    return _output(attention, attended, queries)


def memory_keys_and_values(attention: MultiHeadAttention, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, each (B, H, S, D), of the encoder output (B, S, E)."""
    projected = attention.query_key_value.slice(memory, memory.size(-1))  # (B, S, 2 * E)
    keys, values = _by_head(projected, 2, attention.heads, len(memory)).unbind()
    return keys, values


def _by_head(x: Tensor, parts: int, heads: int, sentences: int) -> Tensor:
    """The parts of x (.., parts * E) by heads, (parts, B, H, K or S, D)."""
    width = x.size(-1) // (parts * heads)
    return x.view(sentences, -1, parts, heads, width).permute(2, 0, 3, 1, 4)


def _output(attention: MultiHeadAttention, attended: Tensor, queries: Tensor) -> Tensor:
    """The output (N, E) of attention (B*H, K, D) for queries (B, H, K, D)."""
    if queries.size(2) > 1:
        attended = attended.view(queries.shape).transpose(1, 2)  # (B, K, H, D)
    return attention.output.forward(attended.reshape(-1, attention.output.in_features))


# ------------------------------------------------------------------------------------------- packed weights


def _packed_copy(model: Transformer, dtype: torch.dtype | None) -> Transformer:
    """A copy in evaluation mode with packed linear maps and less overhead per call. It shares the
    parameters and buffers of the model."""
    generators = [module.generator for module in model.modules() if isinstance(module, Dropout)]
    shared = [model.config, *model.parameters(), *model.buffers(), *generators]
    copied = copy.deepcopy(model, {id(each): each for each in shared})
    for module in reversed(list(copied.modules())):  # the maps of a feed-forward network before itself
        for name, child in module.named_children():
            if isinstance(child, Linear):
                packed = pack(child.weight, child.bias, dtype)
                setattr(module, name, child if packed is None else PackedMap(child, packed))
            elif isinstance(child, FeedForward) and {type(child.inner), type(child.outer)} == {PackedMap}:
                setattr(module, name, PackedFeedForward(child))
    reduce_call_overhead(copied.eval())
    return copied


class PackedMap(Linear):
    """A linear map that is computed by a packed copy of its weights."""

    def __init__(self, original: Linear, packed: PackedLinear):
        vars(self).update(vars(original))  # all that makes it a module, and its parameters
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed)

    def slice(self, x: Tensor, start: int, end: int | None = None) -> Tensor:
        """See `Linear.slice`."""
        part = self.packed.slice(start, end)
        return linear(x, part.weight, part.bias, part)


class PackedFeedForward(FeedForward):
    """A feed-forward network of two packed maps. The activations between them stay in low precision."""

    inner: PackedMap
    outer: PackedMap

    def __init__(self, original: FeedForward):
        vars(self).update(vars(original))  # all that makes it a module, and its maps
        if self.activation is F.relu:
            self.inner = PackedMap(self.inner, self.inner.packed.with_relu())

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner.packed(x)
        return self.outer.packed(h if self.activation is F.relu else self.activate(h)).to(x.dtype)


def reduce_call_overhead(model: nn.Module) -> None:
    """Reduce the overhead of module calls in inference, which takes a quarter of a short decoding step.

    Calls go directly to `forward`, so hooks do not run. Parameters and submodules become plain attributes,
    which Python finds before it calls `nn.Module.__getattr__`; do not replace them afterwards.
    """
    if not undocumented.allowed:
        return
    for module in model.modules():
        vars(module).update(dict(module.named_parameters(recurse=False)))
        vars(module).update(dict(module.named_children()))
        module.__class__ = _without_hooks(type(module))  # type: ignore[arg-type]


@cache
def _without_hooks(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"__call__": kind.forward})
