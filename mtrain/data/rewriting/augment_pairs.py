"""Changes encoded pairs at random, as `data.augment` describes.

Their text is decoded from the ids, so that the raw files are not read again, and changed text is encoded.
"""

import random
from collections.abc import Mapping, Sequence

from mtrain.config.languages import Direction, sentence_separator
from mtrain.config.sections.augment import Augment
from mtrain.config.sections.corpora import Corpus
from mtrain.config.sections.data import DataConfig
from mtrain.data import are_too_long
from mtrain.data.rewriting.augment import CHANGES, Side, change_pair, noise
from mtrain.errors import UsageError
from mtrain.tokenizer.tokenizer import TagIds, Tokenizer

EncodedPair = tuple[list[int], list[int]]  # source and target ids, each ending in EOS, apart from `TagIds`


class PairAugmenter:
    """Changes encoded pairs at random. What it does depends only on the pairs and a generator."""

    def __init__(self, augment: Augment, data: DataConfig, tokenizer: Tokenizer):
        """Raises UsageError if the vocabulary cannot represent noise in `data.max_length` tokens."""
        self._augment, self._max_length = augment, data.max_length
        self._vocabularies = tokenizer.source, tokenizer.target
        self._symbols = [vocabulary.symbol_pattern for vocabulary in self._vocabularies]
        # By the ids that tell the languages, which are equally many in all pairs, perhaps none.
        corpora: dict[TagIds, list[Corpus]] = {}
        for corpus in data.train:
            tags = tokenizer.tags_of(data.direction_of(corpus), data.language_tags)
            corpora.setdefault(tags, []).append(corpus)
        self._directions = {tags: data.common_direction(tagged) for tags, tagged in corpora.items()}
        self._eos = tokenizer.special.eos
        if augment.noise and not self.noise(10 / augment.noise, random.Random(1)):
            reason = "the vocabulary lacks its characters, or data.max_length is too small"
            raise UsageError(f"data.augment.noise: {reason}; leave it out")

    def __call__(self, pairs: Sequence[EncodedPair], generator: random.Random) -> list[EncodedPair]:
        """The pairs, some of them changed. A pair is not changed if it would become empty or too long, or if
        its text is not known, because it has unknown characters."""
        before, after, of_target = map(len, next(iter(self._directions)))
        with_ends = [(source, target, len(source) - after) for source, target in pairs]
        tags = [TagIds(tuple(s[:before]), tuple(s[end:]), tuple(t[:of_target])) for s, t, end in with_ends]
        directions = [self._directions[each] for each in tags]
        pairs = [(s[before:end], t[of_target:]) for s, t, end in with_ends]
        shares = {name: getattr(self._augment, name) for name in (*CHANGES, "merge")}
        # As many random numbers are drawn for each pair, whatever is chosen.
        draws = ([name for name in shares if generator.random() < shares[name]] for _ in pairs)
        chosen = {row: names for row, names in enumerate(draws) if names}
        merged = {
            row: directions[row]
            for row, names in chosen.items()
            if "merge" in names and self._can_merge(pairs, tags, row)
        }
        sources, targets = (self._texts(pairs, side, list(chosen), merged) for side in (0, 1))
        texts: dict[int, tuple[str, str]] = {}
        for row, names in chosen.items():
            source, target = sources[row], targets[row]
            if source is not None and target is not None:
                new = self._changed(source, target, names, directions[row], generator)
                if row in merged or new != (source, target):
                    texts[row] = new
        changed = list(pairs)
        for row, pair in zip(texts, self._encode(list(texts.values())), strict=True):
            if self._is_usable(pair):
                changed[row] = pair
        return [_tagged(each, pair) for each, pair in zip(tags, changed, strict=True)]

    def noise(self, pairs: float, generator: random.Random) -> list[EncodedPair]:
        """The random pairs that are added to a number of pairs."""
        count = int(pairs * self._augment.noise + generator.random())
        unknown = [vocabulary.special.unk for vocabulary in self._vocabularies]
        drawn = [noise(generator) for _ in range(count)]
        encoded = self._encode([(text, text) for text in drawn])
        tags = [*self._directions]
        return [
            _tagged(generator.choice(tags), pair)
            for pair in encoded
            if self._is_usable(pair) and not any(unk in ids for unk, ids in zip(unknown, pair, strict=True))
        ]

    def _can_merge(self, pairs: Sequence[EncodedPair], tags: Sequence[TagIds], row: int) -> bool:
        """Whether the next pair may be appended: there is one, and it has the same tags."""
        if row + 1 == len(pairs) or tags[row] != tags[row + 1]:
            return False
        sides = zip(self._vocabularies, *pairs[row : row + 2], strict=True)
        return all(vocabulary.tag(ids) == vocabulary.tag(following) for vocabulary, ids, following in sides)

    def _texts(
        self, pairs: Sequence[EncodedPair], side: int, rows: Sequence[int], merged: Mapping[int, Direction]
    ) -> dict[int, str | None]:
        """The texts of one side of some rows by row, the `merged` ones with the next row; None if one is not
        known."""
        vocabulary = self._vocabularies[side]
        unknown = vocabulary.special.unk
        ids = {row: pairs[row][side] for row in rows}
        following = {row: pairs[row + 1][side] for row in merged}
        decoded = vocabulary.decode([row_ids[:-1] for row_ids in ids.values()])
        untagged = [row_ids[len(vocabulary.tag(row_ids)) : -1] for row_ids in following.values()]
        appended = vocabulary.decode(untagged)
        texts = dict(zip(rows, decoded, strict=True))
        for (row, direction), text in zip(merged.items(), appended, strict=True):
            texts[row] += sentence_separator(direction[side]) + text
        is_unknown = {row for row in rows if unknown in ids[row] or unknown in following.get(row, ())}
        return {row: None if row in is_unknown else text for row, text in texts.items()}

    def _changed(
        self, source: str, target: str, names: Sequence[str], direction: Direction, generator: random.Random
    ) -> tuple[str, str]:
        sides = Side(direction.source, self._symbols[0]), Side(direction.target, self._symbols[1])
        for name in CHANGES:
            if name in names:
                source, [target] = change_pair(name, source, [target], sides, generator)
        return source, target

    def _encode(self, texts: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """The ids of pairs of text."""
        rows = [each.encode([pair[side] for pair in texts]) for side, each in enumerate(self._vocabularies)]
        return [([*source, self._eos], [*target, self._eos]) for source, target in zip(*rows, strict=True)]

    def _is_usable(self, pair: EncodedPair) -> bool:
        source, target = map(len, pair)
        added = next(iter(self._directions)).counts
        too_long = are_too_long(source + added[0], target + added[1], self._max_length)
        return min(source, target) > 1 and not too_long


def _tagged(tags: TagIds, pair: EncodedPair) -> EncodedPair:
    """A pair with the ids that tell its languages."""
    source, target = pair
    return [*tags.source, *source, *tags.after_source], [*tags.target, *target]
