"""Choose the attention head for word alignments. The engine uses the first head of one decoder layer; mtrain
averages all heads of a layer, unless the model has an alignment head."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtrain.checkpoint.model_folder import LoadedModel
from mtrain.config.sections.decoding import DecodingConfig
from mtrain.decoding.alignment import Words, align, words_at
from mtrain.decoding.search.forced import all_attention
from mtrain.decoding.search.search import best_ids
from mtrain.model.incremental import DecodingTransformer
from mtrain.tokenizer.vocabulary import Vocabulary


def choose_head(loaded: LoadedModel, rows: Sequence[list[int]]) -> tuple[int, int]:
    """The decoder layer and the head for word alignments: the alignment head, if the model has one, otherwise
    the head whose alignments have the most links in common with those of mtrain, in translations of rows of
    source ids, which end with EOS."""
    layers, layer = len(loaded.model.decoder), loaded.config.decoding.alignment_layer
    if loaded.model.config.alignment_head and (layer is None or layer >= layers - 1):
        return layers - 1, 0
    own = layers - 1 if layer is None else min(layer, layers - 1)
    model = DecodingTransformer(loaded.model)
    agreements = np.zeros((layers, loaded.model.config.heads))
    for row in rows:
        source = torch.tensor([row])
        keep = torch.ones_like(source, dtype=torch.bool)
        ids = best_ids(model, row, DecodingConfig(beam_size=1))
        target = torch.tensor([[*ids, loaded.model.config.eos_id]])
        cross = torch.cat(all_attention(model, source, keep, target)["cross"]).numpy()  # (L, H, T, S)
        words = _words(loaded.tokenizer.source, row[:-1]), _words(loaded.tokenizer.target, ids)
        ours = set(align(cross[own].mean(axis=0), *words))
        for place in np.ndindex(agreements.shape):
            agreements[place] += len(ours.intersection(align(cross[place], *words)))
    return divmod(int(agreements.argmax()), loaded.model.config.heads)


def _words(vocabulary: Vocabulary, ids: list[int]) -> list[Words]:
    """The words of each token."""
    return words_at(vocabulary.decode([ids])[0], vocabulary.decoded_positions(ids))


def with_head_first(tensors: dict[str, Tensor], layer: int, head: int, heads: int) -> dict[str, Tensor]:
    """The tensors of an equivalent Transformer with another order of the heads in the cross-attention of a
    decoder layer: the given one comes first."""
    order = [head, *(each for each in range(heads) if each != head)]
    name = f"decoder.{layer}.cross_attention"
    reordered = dict(tensors)
    for part in ("weight", "bias"):
        fused = tensors[f"{name}.query_key_value.{part}"]  # (3E, E) or (3E)
        by_head = fused.view(3, heads, -1, *fused.shape[1:])
        reordered[f"{name}.query_key_value.{part}"] = by_head[:, order].flatten(0, 2)
    output = tensors[f"{name}.output.weight"]  # (E, E)
    output = output.view(len(output), heads, -1)
    reordered[f"{name}.output.weight"] = output[:, order].flatten(1)
    return reordered
