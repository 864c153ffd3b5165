"""Export to CTranslate2 (github.com/OpenNMT/CTranslate2) through its model specification."""

import math
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.interop.formats import import_optional, with_positions
from mtrain.model.transformer import DecoderLayer, EncoderLayer, Transformer

_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "silu": "SWISH", "swiglu": "SWISH"}


def write_ctranslate2(loaded: LoadedModel, folder: Path, quantization: str | None) -> None:
    """Write a model and its SentencePiece models to an empty folder, for `ctranslate2.Translator`.

    CTranslate2 adds EOS to the source, unless a code of its language follows EOS. Forbidden tokens get a bias
    of minus infinity.
    """
    converter = import_optional("ctranslate2.converters")

    class Converter(converter.Converter):  # type: ignore[misc, name-defined]
        """The base class validates, quantizes and saves the specification."""

        def _load(self) -> Any:
            return _spec(loaded)

    Converter().convert(str(folder), quantization=quantization, force=True)
    for file in loaded.tokenizer.files:
        shutil.copyfile(file, folder / file.name)


def _spec(loaded: LoadedModel) -> Any:
    """The CTranslate2 specification of a model, with its weights."""
    specs = import_optional("ctranslate2.specs")
    model, config = loaded.model, loaded.model.config
    shape: dict[str, Any] = {
        "num_heads": config.heads,
        "pre_norm": config.norm == "pre",
        "activation": getattr(specs.Activation, _ACTIVATIONS[config.activation]),
        "ffn_glu": config.activation == "swiglu",
    }
    if config.positions == "rotary":
        shape |= {"rotary_dim": config.d_model // config.heads, "rotary_interleave": False}
    encoder = specs.TransformerEncoderSpec(config.encoder_layers, **shape)
    decoder = specs.TransformerDecoderSpec(config.decoder_layers, **shape)
    length = with_positions(loaded).max_positions  # as many as mtrain may use
    for side, layers, norm, learned in (
        (encoder, model.encoder, model.encoder_norm, model.learned_positions),
        (decoder, model.decoder, model.decoder_norm, model.learned_target_positions),
    ):
        for spec, layer in zip(side.layer, layers, strict=True):
            _layer(spec, layer)
        if config.norm == "pre":
            _norm(side.layer_norm, norm)
        if (table := model.embed.positions(0, length, learned)) is not None:  # they are not rotary
            side.position_encodings.encodings = _copy(table)
    encoder.embeddings[0].weight = _copy(model.source_embedding.weight)
    decoder.embeddings.weight = _copy((model.target_embedding or model.source_embedding).weight)
    _linear(decoder.projection, *masked_projection(model, loaded.config.decoding.forbidden_ids))

    spec = specs.TransformerSpec(encoder, decoder)
    pieces = loaded.tokenizer.target.pieces
    spec.register_source_vocabulary(loaded.tokenizer.source.pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token, spec.config.eos_token = pieces[config.unk_id], pieces[config.eos_id]
    spec.config.bos_token = spec.config.decoder_start_token = pieces[config.bos_id]
    # Otherwise, EOS is not the last token.
    spec.config.add_source_eos = loaded.config.language_tags != "codes_last"
    return spec


def masked_projection(model: Transformer, forbidden_ids: list[int]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the output projection, with a bias of minus infinity for forbidden tokens."""
    weight, bias = model.projection()
    if forbidden_ids:
        bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().clone()
        bias[forbidden_ids] = -math.inf
    return weight, bias


def _layer(spec: Any, layer: nn.Module) -> None:
    assert isinstance(layer, (EncoderLayer, DecoderLayer))
    fused = layer.self_attention.query_key_value
    _linear(spec.self_attention.linear[0], fused.weight, fused.bias)
    _module(spec.self_attention.linear[1], layer.self_attention.output)
    _norm(spec.self_attention.layer_norm, layer.self_attention_residual.norm)
    if isinstance(layer, DecoderLayer):
        fused, width = layer.cross_attention.query_key_value, layer.cross_attention.output.in_features
        _linear(spec.attention.linear[0], fused.weight[:width], fused.bias[:width])  # queries
        _linear(spec.attention.linear[1], fused.weight[width:], fused.bias[width:])  # keys and values
        _module(spec.attention.linear[2], layer.cross_attention.output)
        _norm(spec.attention.layer_norm, layer.cross_attention_residual.norm)
    inner = layer.feed_forward.inner
    if layer.feed_forward.gated:
        half = len(inner.weight) // 2
        _linear(spec.ffn.linear_0, inner.weight[:half], inner.bias[:half])
        _linear(spec.ffn.linear_0_noact, inner.weight[half:], inner.bias[half:])
    else:
        _module(spec.ffn.linear_0, inner)
    _module(spec.ffn.linear_1, layer.feed_forward.outer)
    _norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _module(spec: Any, module: nn.Linear) -> None:
    _linear(spec, module.weight, module.bias)


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _copy(weight)
    if bias is not None:
        spec.bias = _copy(bias)


def _norm(spec: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.LayerNorm)
    spec.gamma, spec.beta = _copy(norm.weight), _copy(norm.bias)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, because CTranslate2 quantizes in place."""
    return tensor.detach().clone()
