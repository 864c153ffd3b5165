"""The choice of the decoder layer to take word alignments from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtrain.decoding.alignment import FloatMatrix
from mtrain.decoding.batches import in_batches, padded, position_limit
from mtrain.decoding.search.forced import layer_attention
from mtrain.model.build import evaluating
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer

# Limits of the sample of sentence pairs:
_PAIRS = 500
_LENGTH = 100  # tokens of a sentence
_LINKS = 500_000  # pairs of a target token and a source token of the same sentence pair
_BATCH_TOKENS = 4096  # padded tokens of a batch
_ITERATIONS = 5  # of expectation maximization


def choose_alignment_layer(
    model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], device: torch.device
) -> int | None:
    """The decoder layer, counted from 0, to take word alignments from: see `best_layer`. None, which means
    the last layer, if no pair is within the limits above, or if the model has an alignment head.

    `pairs` are source and target lines, such as validation data. The first of them are used, up to the limits
    above. The training mode of the model is restored.
    """
    if model.config.alignment_head:
        return None
    sources = tokenizer.encode_source([source for source, _ in pairs[:_PAIRS]])
    targets = tokenizer.encode_target([target for _, target in pairs[:_PAIRS]])
    longest = min(_LENGTH, position_limit([model]) or _LENGTH)
    both = zip(sources, targets, strict=True)
    kept = [pair for pair in both if all(0 < len(ids) < longest for ids in pair)]
    if not kept:
        return None
    links = np.cumsum([(len(source) + 1) * len(target) for source, target in kept])
    kept = kept[: np.searchsorted(links, _LINKS)]
    special = tokenizer.special
    attention: list[list[Any]] = [[] for _ in model.decoder]
    order: list[int] = []
    with evaluating(model):
        for rows in in_batches([max(map(len, pair)) for pair in kept], _BATCH_TOKENS):
            source, keep = padded([[*kept[row][0], special.eos] for row in rows], special.pad, device)
            target, _ = padded([[*kept[row][1], special.eos] for row in rows], special.pad, device)
            of_batch = layer_attention(model, source, keep, target)
            for of_layer, weights in zip(attention, of_batch, strict=True):
                of_layer.extend(weights.float().cpu().numpy())
            order += rows
    return best_layer([kept[row][0] for row in order], [kept[row][1] for row in order], attention)


def best_layer(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    attention: Sequence[Sequence[FloatMatrix]],
) -> int:
    """The layer whose attention agrees best with a statistical alignment of the same sentence pairs.

    `sources` and `targets` are token ids without EOS; `attention[layer][pair]` (T, S or more) is from target
    to source tokens. The alignment comes from IBM model 1 (Brown et al., "The Mathematics of Statistical
    Machine Translation", 1993), estimated on the pairs; no reference alignments are needed. The agreement of
    a layer is the probability under that model of the source token that a target token attends to most,
    summed over the target tokens. No sentence may be empty.
    """
    posteriors = _ibm_model_1(sources, targets)
    agreements = np.zeros(len(attention))
    for index, layer in enumerate(attention):
        for posterior, weights in zip(posteriors, layer, strict=True):
            rows, columns = posterior.shape
            attended = weights[:rows, :columns].argmax(axis=1)
            agreements[index] += posterior[np.arange(rows), attended].sum()
    return int(agreements.argmax())


def _ibm_model_1(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[FloatMatrix]:
    """Posterior probabilities (T, S), for each pair, that a target token is aligned to a source token.

    The rows sum to less than 1; the remainder is the probability that the token is not aligned.
    """
    pairs = list(zip(sources, targets, strict=True))
    shapes = [(len(target), len(source) + 1) for source, target in pairs]
    # Source token 0 is an additional token of each sentence, for target tokens that are not aligned.
    source_token = 1 + np.concatenate([np.tile([-1, *source], len(target)) for source, target in pairs])
    target_token = np.concatenate([np.repeat(target, len(source) + 1) for source, target in pairs])
    widths = np.concatenate([np.full(rows, columns) for rows, columns in shapes])
    row = np.repeat(np.arange(len(widths)), widths)  # of all target tokens
    vocabulary = int(source_token.max()) + 1
    _, entry = np.unique(target_token.astype(np.int64) * vocabulary + source_token, return_inverse=True)
    table: npt.NDArray[Any] = np.ones(int(entry.max()) + 1)  # p(target token | source token)
    for iteration in range(_ITERATIONS + 1):
        posterior = table[entry] / np.bincount(row, table[entry])[row]
        if iteration < _ITERATIONS:
            totals = np.bincount(source_token, posterior)[source_token]
            table = np.bincount(entry, posterior / totals)
    ends = np.cumsum([rows * columns for rows, columns in shapes], dtype=np.int64)
    matrices = np.split(posterior, ends)[:-1]
    return [matrix.reshape(shape)[:, 1:] for matrix, shape in zip(matrices, shapes, strict=True)]
