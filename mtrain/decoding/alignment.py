"""Word alignments from cross-attention, and the choice of the layer to take them from."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Alignment = tuple[tuple[int, int], ...]  # (source word, target word), counted from 0
Floats = npt.NDArray[np.float64] | npt.NDArray[np.float32]

_ITERATIONS = 5  # iterations of expectation maximization


def align(attention: Floats, source_starts: Sequence[bool], target_starts: Sequence[bool]) -> Alignment:
    """Align each target word to the source word that it attends to most, summed over tokens.

    `attention` (T, S) is from target to source tokens; tokens after the last word, such as EOS, are ignored.
    `source_starts` and `target_starts` mark the tokens that begin a word; the first token always does.
    """
    if not source_starts or not target_starts:
        return ()
    source, target = np.cumsum(source_starts) - 1, np.cumsum(target_starts) - 1  # the word of each token
    words = np.zeros((target[-1] + 1, source[-1] + 1))
    np.add.at(words, (target[:, None], source[None]), attention[: len(target), : len(source)])
    return tuple((int(best), word) for word, best in enumerate(words.argmax(axis=1)))


def best_layer(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], attention: Sequence[Sequence[Floats]]
) -> int:
    """The layer whose attention agrees best with a statistical alignment of the same sentence pairs.

    `sources` and `targets` are token ids without EOS; `attention[layer][pair]` (T, S or more) is from target
    to source tokens. The alignment is that of IBM model 1 (Brown et al., "The Mathematics of Statistical
    Machine Translation", 1993), estimated on the pairs; no reference alignments are needed. The agreement of
    a layer is the mean probability under that model of the source token that a target token attends to most.
    """
    posteriors = _ibm_model_1(sources, targets)
    agreements = []
    for layer in attention:
        total, count = 0.0, 0
        for posterior, weights in zip(posteriors, layer, strict=True):
            rows, columns = posterior.shape
            if rows and columns:
                attended = weights[:rows, :columns].argmax(axis=1)
                total, count = total + posterior[np.arange(rows), attended].sum(), count + rows
        agreements.append(total / max(count, 1))
    return int(np.argmax(agreements))


def _ibm_model_1(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[Floats]:
    """Posterior probabilities (T, S), for each pair, that a target token is aligned to a source token; rows
    sum to less than 1; the remainder is the probability that the token is not aligned."""
    null = -1  # an additional source token in each sentence, for target tokens that are not aligned
    links = [
        (t, s, pair, row)
        for pair, (source, target) in enumerate(zip(sources, targets, strict=True))
        for row, t in enumerate(target)
        for s in (null, *source)
    ]
    if not links:
        return [np.zeros((len(target), len(source))) for source, target in zip(sources, targets, strict=True)]
    columns = np.array(links)
    _, entry = np.unique(
        columns[:, :2], axis=0, return_inverse=True
    )  # of the table of (target, source) pairs
    _, source_token = np.unique(columns[:, 1], return_inverse=True)
    _, position = np.unique(columns[:, 2:], axis=0, return_inverse=True)  # target token of a pair
    entry, position = entry.reshape(-1), position.reshape(-1)
    table = np.ones(entry.max() + 1)  # p(target token | source token)
    for _ in range(_ITERATIONS):
        posterior = table[entry] / np.bincount(position, table[entry])[position]
        totals = np.bincount(source_token, posterior)[source_token]
        table = np.bincount(entry, posterior / totals)
    posterior = table[entry] / np.bincount(position, table[entry])[position]
    found: list[Floats] = []
    start = 0
    for source, target in zip(sources, targets, strict=True):
        end = start + len(target) * (len(source) + 1)
        found.append(posterior[start:end].reshape(len(target), len(source) + 1)[:, 1:])
        start = end
    return found
