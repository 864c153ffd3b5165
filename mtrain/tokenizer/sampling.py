"""Subword regularization: samples new segmentations of encoded sentences.

`unigram` samples from all segmentations of a word (Kudo, "Subword Regularization", ACL 2018, section 3), and
`bpe` skips merges at random (Provilkov et al., "BPE-Dropout", ACL 2020, algorithm 1). SentencePiece's
own sampling is not used: version 0.2.3 ignores the seed, so an epoch could not be reproduced on resume. No
piece spans two words, so words are sampled independently, from the ids alone, and many at the same time.
"""

from collections.abc import Callable

import numpy as np

from mtrain.tokenizer.bpe_dropout import BpeSampler
from mtrain.tokenizer.lattices import UnigramSampler
from mtrain.tokenizer.rows import Rows
from mtrain.tokenizer.vocabulary import SPACE, Vocabulary

Resegment = Callable[[Rows, np.random.Generator], Rows]


def make_resegment(vocabulary: Vocabulary, strength: float) -> Resegment:
    """A function that samples a segmentation of each of some rows of ids. Symbols, bytes and <unk> are kept.

    `strength`, in (0, 1], is the exponent alpha of the probability of a segmentation for `unigram`, and the
    probability that a merge is skipped for `bpe`.
    """
    names, scores = vocabulary.pieces, np.array(vocabulary.scores())
    # Pieces that were not learned have the score 0.0; the first merge of bpe has -0.0.
    fixed = (scores == 0) & ~np.signbit(scores)
    fixed[vocabulary.special.unk] = True
    begins_word = fixed | [name.startswith(SPACE) for name in names]
    learned = np.flatnonzero(~fixed)
    is_bpe = bool((scores[learned] % 1 == 0).all())  # scores of bpe are ranks of merges
    draw = (BpeSampler if is_bpe else UnigramSampler)(names, scores, learned.tolist(), strength)

    def resegment(rows: Rows, generator: np.random.Generator) -> Rows:
        ids, is_fixed = rows.ids, fixed[rows.ids]
        begins = begins_word[ids]
        begins[1:] |= is_fixed[:-1]
        begins[rows.starts[:-1][rows.lengths > 0]] = True
        starts = np.flatnonzero(begins)
        words = Rows(ids, np.diff(starts, append=len(ids)))
        is_sampled = ~is_fixed[starts]
        if not is_sampled.any():
            return rows
        sampled = draw(words.take(np.flatnonzero(is_sampled)), generator)
        lengths = words.lengths.copy()
        lengths[is_sampled] = sampled.lengths
        in_sampled = np.repeat(is_sampled, lengths)
        new = np.empty(len(in_sampled), ids.dtype)
        new[in_sampled], new[~in_sampled] = sampled.ids, ids[is_fixed]
        row_of_word = np.repeat(np.arange(len(rows.lengths)), rows.lengths)[starts]
        row_lengths = np.bincount(row_of_word, lengths, len(rows.lengths)).astype(rows.lengths.dtype)
        return Rows(new, row_lengths)

    return resegment
