"""Encodes blocks of the training corpora: from text to rows of token ids."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from operator import not_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrain.config.corpora import Corpus
from mtrain.config.data import DataConfig
from mtrain.data.pairs.rejections import REASONS, Codes
from mtrain.data.reading.blocks import RawBlock
from mtrain.data.reading.parse import Block, parse_block, refuse_unless_skipped
from mtrain.tokenizer.rows import Ids, Indices, Rows
from mtrain.tokenizer.tokenizer import Tokenizer

# Texts that are encoded at a time: so few that their ids are still in the processor's cache when they are
# copied.
_TEXTS = 1000


class EncodedBlock(NamedTuple):
    """The usable pairs of a block, as ids."""

    sides: tuple[Rows, Rows]
    numbers: Indices  # of the pairs in their corpus, from 1
    dropped: dict[str, int]  # number of other pairs by reason
    pairs: int  # all pairs


class Encoder:
    """Encodes blocks of the training corpora."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, held_out: frozenset[str]):
        """`held_out` are the sources of pairs held out for validation; if there are several directions, also
        their targets, which may be sources or targets of other corpora."""
        self._data, self._tokenizer, self._held_out = data, tokenizer, held_out
        largest = max(tokenizer.source_vocab_size, tokenizer.target_vocab_size)
        self._dtype: type[np.integer] = np.uint16 if largest <= 2**16 else np.int32
        self._tags = [tokenizer.tag_ids(data.tag_of(corpus)) for corpus in data.train]

    def settings(self) -> dict[str, Any]:
        """What another process needs to make this encoder, for JSON."""
        folder = self._tokenizer.files[0].parent.resolve()
        data = self._data.model_dump(mode="json")
        return {"data": data, "tokenizer": str(folder), "held_out": sorted(self._held_out)}

    @classmethod
    def with_settings(cls, settings: dict[str, Any]) -> "Encoder":
        """An encoder with the `settings` of another one. It uses one thread."""
        tokenizer = Tokenizer(Path(settings["tokenizer"]))
        tokenizer.set_threads(1)
        data = DataConfig.model_validate(settings["data"])
        return cls(data, tokenizer, frozenset(settings["held_out"]))

    @property
    def corpora(self) -> list[Corpus]:
        """The training corpora."""
        return self._data.train

    def encode(self, raw: RawBlock, corpus: int, codes: Codes | None = None) -> EncodedBlock:
        """Encode a block of corpus number `corpus` (from 0). `codes` are those of its pairs in `Rejections`.
        Raises DataError if a pair is unreadable and `data.bad_lines` is not `skip`."""
        return self.encode_block(parse_block(raw, self.corpora[corpus]), corpus, codes)

    def encode_block(self, block: Block, corpus: int, codes: Codes | None = None) -> EncodedBlock:
        """Like `encode`, for a decoded block."""
        for error in block.errors.values():
            refuse_unless_skipped(error, self._data.bad_lines)
        total, rejected = len(block.sources) + len(block.errors), dict[str, int]()
        if codes is not None:
            codes = codes[block.indices]
            block = block.select(codes == 0)
            counts = np.bincount(codes, minlength=len(REASONS) + 1)[1:].tolist()
            rejected = dict(zip(REASONS, counts, strict=True))
        sides = [
            self._encode(self._tokenizer.encode_source, block.sources, self._tags[corpus]),
            self._encode(self._tokenizer.encode_target, block.targets),
        ]
        lengths, count = [side.lengths for side in sides], len(block.sources)
        blank = [np.fromiter(map(not_, map(str.strip, texts)), np.bool_, count) for texts in block[:2]]
        # Also empty if normalization removes every character.
        empty = blank[0] | blank[1] | (lengths[0] == 1 + len(self._tags[corpus])) | (lengths[1] == 1)
        # Including duplicates, since validation must not score training pairs.
        is_held_out = self._held_out.__contains__
        held_out = np.fromiter(map(is_held_out, block.sources), np.bool_, count)
        if self._data.has_several_directions:
            held_out |= np.fromiter(map(is_held_out, block.targets), np.bool_, count)
        held_out &= ~empty
        too_long = (np.maximum(*lengths) > self._data.max_length) & ~empty & ~held_out
        kept = np.flatnonzero(~(empty | held_out | too_long))
        dropped = Counter(bad=len(block.errors), empty=int(empty.sum()))
        dropped.update({"held out": int(held_out.sum()), "too long": int(too_long.sum()), **rejected})
        return EncodedBlock(
            (sides[0].take(kept), sides[1].take(kept)),
            np.asarray(block.numbers, np.int64)[kept],
            {reason: number for reason, number in dropped.items() if number},
            total,
        )

    def _encode(
        self, encode: Callable[[list[str]], list[list[int]]], texts: list[str], tag: Sequence[int] = ()
    ) -> Rows:
        """The ids of each text, after those of a language tag, and EOS."""
        ids: list[Ids] = [np.empty(0, self._dtype)]
        lengths: list[int] = []
        for start in range(0, len(texts), _TEXTS):
            rows = encode(texts[start : start + _TEXTS])
            for row in rows:
                row[:0] = tag
                row.append(self._tokenizer.special.eos)
            lengths += map(len, rows)
            ids.append(np.fromiter(chain.from_iterable(rows), self._dtype))
        return Rows(np.concatenate(ids), np.array(lengths, np.int64))
