"""Probabilities and attention of given translations. Symbols in shapes: see `mtrain.model`."""

import math

import torch
from torch import Tensor

from mtrain.decoding.search.predictor import log_probs_of
from mtrain.kernels.attention.dispatch import recording
from mtrain.kernels.topk import logsumexp
from mtrain.model.incremental import DecodingTransformer, Models
from mtrain.model.transformer import Transformer

_ROWS = 1024  # positions whose logits are computed at a time, to bound memory


@torch.inference_mode()
def forced_log_probs(models: Models, source: Tensor, source_keep: Tensor, targets: Tensor) -> Tensor:
    """Log-probability (N, T), nats, of each token of targets (N, T): K targets for each of B sources (B, S).

    Targets end with EOS. Values at their padding are meaningless. An ensemble averages probabilities.
    """
    log_probs = [_log_probs(model, _hidden(model, source, source_keep, targets), targets) for model in models]
    return torch.stack(log_probs).logsumexp(dim=0) - math.log(len(models))


@torch.inference_mode()
def cross_attention(
    models: Models, source: Tensor, source_keep: Tensor, targets: Tensor, layer: int | None = None
) -> Tensor:
    """The cross-attention weights (N, T, S) of a decoder layer (None: the last) when it predicts the tokens
    of targets (N, T), as of `layer_attention`, averaged over the models of an ensemble."""
    of_models = []
    for model in models:
        last = model.config.decoder_layers - 1
        index = last if layer is None else min(layer, last)
        with recording(cross_from=index) as maps:
            _hidden(model, source, source_keep, targets)
        of_models.append(_of_heads(model, maps[0], index == last))
    return torch.stack(of_models).mean(dim=0)


@torch.inference_mode()
def layer_attention(
    model: Transformer | DecodingTransformer, source: Tensor, source_keep: Tensor, targets: Tensor
) -> list[Tensor]:
    """The cross-attention weights (N, T, S) of each decoder layer, averaged over heads. If the model has an
    alignment head, the weights of the last layer are those of this head."""
    with recording(cross_from=0) as maps:
        _hidden(model, source, source_keep, targets)
    return [_of_heads(model, of_layer, of_layer is maps[-1]) for of_layer in maps]


def _of_heads(model: Transformer | DecodingTransformer, weights: Tensor, is_last: bool) -> Tensor:
    """One matrix (N, T, S) for the weights (N, H, T, S) of a layer, which may be the last one."""
    return weights[:, 0] if is_last and model.config.alignment_head else weights.mean(dim=1)


@torch.inference_mode()
def all_attention(
    model: DecodingTransformer, source: Tensor, source_keep: Tensor, targets: Tensor
) -> dict[str, list[Tensor]]:
    """The attention weights of all layers and heads: self-attention of the encoder, each (B, H, S, S), of the
    decoder, each (N, H, T, T), and cross-attention, each (N, H, T, S). Each row sums to 1. The inputs of the
    decoder are BOS, then all tokens of targets (N, T) but the last."""
    with recording() as maps:
        _hidden(model, source, source_keep, targets)
    layers = model.config.encoder_layers
    decoder = maps[layers:]  # of each layer: self-attention, then cross-attention
    return {"encoder": maps[:layers], "decoder": decoder[0::2], "cross": decoder[1::2]}


def _hidden(
    model: Transformer | DecodingTransformer, source: Tensor, source_keep: Tensor, targets: Tensor
) -> Tensor:
    """Hidden states (N, T, E) from which the tokens of targets (N, T) are predicted."""
    bos = targets.new_full((len(targets), 1), model.config.bos_id)
    inputs = torch.cat([bos, targets[:, :-1]], dim=1)  # (N, T)
    return model.decode(inputs, model.encode(source, source_keep), source_keep)


def _log_probs(model: DecodingTransformer, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of targets (N, T) given hidden states (N, T, E), in fp32 or fp64."""
    chunks = []
    states, ids = hidden.flatten(0, 1), targets.flatten()[:, None]
    for start in range(0, len(ids), _ROWS):
        rows = slice(start, start + _ROWS)
        logits = model.project(states[rows])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chunks.append(log_probs_of(model, states[rows], logits, logsumexp(logits), ids[rows]))
    return torch.cat(chunks).view(targets.shape)
