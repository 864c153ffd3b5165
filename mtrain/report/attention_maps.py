"""Attention weights of a model for given sentences. Symbols in shapes: see `mtrain.model`."""

import base64
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.decoding.batches import padded
from mtrain.decoding.search.forced import all_attention
from mtrain.decoding.translate import Translator
from mtrain.tokenizer.vocabulary import Vocabulary

LONGEST = 60  # tokens of a sentence that are shown, at most
KINDS = {"cross": "Decoder to encoder", "encoder": "Encoder", "decoder": "Decoder"}


class AttentionMap(NamedTuple):
    """The attention weights of one sentence and its translation, in percent."""

    source: list[str]  # tokens, EOS last
    target: list[str]
    layers: dict[str, list[Tensor]]  # by kind: uint8 (H, queries, keys) of each layer
    cut: bool  # whether the sentence or its translation is longer
    best_layer: int  # the decoder layer that word alignments come from, from 0

    def tokens(self, kind: str) -> tuple[list[str], list[str]]:
        """The tokens that attend, and those that are attended to."""
        if kind == "encoder":
            return self.source, self.source
        return self.target, ["<s>", *self.target[:-1]] if kind == "decoder" else self.source

    def packed(self) -> str:
        """The maps of all kinds, layers and heads one after another, compressed by zlib, in base64."""
        parts = [layer.numpy().tobytes() for layers in self.layers.values() for layer in layers]
        return base64.b64encode(zlib.compress(b"".join(parts), 9)).decode("ascii")


@torch.inference_mode()
def attention_maps(
    translator: Translator, sources: Sequence[str], translations: Sequence[str]
) -> list[AttentionMap]:
    """The attention with which a model reads each source and predicts its translation. Of an ensemble, it is
    that of the first model.

    Row t of the decoder's maps is the position that predicts target token t. It attends to BOS and the
    tokens before t, which are the columns of the decoder's own map.
    """
    tokenizer, model = translator.tokenizer, translator.models[0]
    special = tokenizer.special
    longest = min(LONGEST, translator.max_length)
    maps = []
    encoded_sources = translator.splitter.encode(sources)
    encoded_targets = tokenizer.encode_target(list(translations))
    for source, target in zip(encoded_sources, encoded_targets, strict=True):
        source_ids = [*source[: longest - 1], special.eos]
        target_ids = [*target[: longest - 1], special.eos]
        batch, keep = padded([source_ids], special.pad, translator.device)
        targets, _ = padded([target_ids], special.pad, translator.device)
        weights = all_attention(model, batch, keep, targets)
        percent = {
            kind: [(100 * layer[0].float()).round().to(torch.uint8).cpu() for layer in getattr(weights, kind)]
            for kind in KINDS
        }
        last = model.config.decoder_layers - 1
        layer = translator.decoding.alignment_layer
        attention_map = AttentionMap(
            _pieces(tokenizer.source, source_ids),
            _pieces(tokenizer.target, target_ids),
            percent,
            max(len(source), len(target)) >= longest,
            last if layer is None else min(layer, last),
        )
        maps.append(attention_map)
    return maps


def _pieces(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str]:
    """The tokens as SentencePiece writes them: `▁` is a space, and the last one ends the sentence."""
    return [*(vocabulary.pieces[i] for i in ids[:-1]), "</s>"]
