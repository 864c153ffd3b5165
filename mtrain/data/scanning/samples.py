"""Random samples of the training pairs: the text that the tokenizer is learned from, and the held-out pairs.

Which pairs are sampled depends on hashes, not on the order in which blocks are added.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrain.data import Pair
from mtrain.data.reading.blocks import Block
from mtrain.data.text.hashes import hash_numbers
from mtrain.invisible_characters import is_blank
from mtrain.storage.temporary import TemporaryStream

CANDIDATES = 10_000  # held-out candidates kept in memory in addition to twice the requested number
ALL_PAIRS = 2**32  # the threshold of a sample that contains every pair
ANY_DIGEST = b"\xff" * 16  # the largest digest
Integers = npt.NDArray[np.uint32]


class BlockSample(NamedTuple):
    """The pairs of a block that are in a sample."""

    random_numbers: Integers  # of the pairs
    sizes: Integers  # of the pairs, in characters
    texts: tuple[bytes, bytes]  # sources and targets, each followed by a line end


def sample_block(block: Block, corpus: int, seed: int, threshold: int) -> BlockSample:
    """Sample each pair of a block of corpus number `corpus` with probability `threshold` / 2**32."""
    numbers = np.asarray(block.numbers, np.int64)
    random_numbers = (hash_numbers(numbers, f"sample {seed} {corpus}") >> np.uint64(32)).astype(np.uint32)
    kept = random_numbers < threshold
    if not kept.all():
        block = block.select(kept)
    sizes = sum(np.fromiter(map(len, side), np.uint32, len(side)) for side in block[:2])
    texts = _to_lines(block.sources), _to_lines(block.targets)
    return BlockSample(random_numbers[kept], np.asarray(sizes), texts)


def _to_lines(texts: list[str]) -> bytes:
    """The texts as lines. Text has no NUL, but a field of JSON may have a line end."""
    return "".join(text.replace("\n", "\0") + "\n" for text in texts).encode()


class TextSample:
    """A uniform sample of pairs of at most `max_characters` characters, in the order of the corpus. A
    corpus of up to `max_characters` is sampled completely.

    Each pair has a random number and is kept if that is below `threshold`, which is reduced by an eighth when
    the sample is full. The text is stored in files; in memory, each pair that was ever in the sample takes 8
    bytes.
    """

    def __init__(self, max_characters: int, folder: Path | None = None):
        self._max_characters, self.threshold = max_characters, ALL_PAIRS
        # Of the pairs in the files; those whose numbers are at or above `threshold` left the sample.
        self._random_numbers, self._sizes = array("I"), array("I")
        self._pairs = self._size = 0
        self._corpora: list[tuple[int, int]] = []  # of the pairs in the files: the corpus of so many pairs
        self._files = [TemporaryStream(folder) for _ in Pair._fields]

    def __len__(self) -> int:
        return self._pairs

    def add(self, sample: BlockSample, corpus: int) -> None:
        """Add the next block of corpus number `corpus` (from 0), sampled with `threshold` or a higher one.
        Raises StorageError."""
        self._corpora.append((corpus, len(sample.random_numbers)))
        for file, texts in zip(self._files, sample.texts, strict=True):
            file.write(texts)
        self._random_numbers.frombytes(sample.random_numbers.tobytes())
        self._sizes.frombytes(sample.sizes.tobytes())
        self._count(sample.random_numbers, sample.sizes)
        while self._size > self._max_characters:
            self.threshold -= -(-self.threshold // 8)
            self._pairs = self._size = 0
            self._count(np.frombuffer(self._random_numbers, np.uint32), np.frombuffer(self._sizes, np.uint32))

    def _count(self, random_numbers: Integers, sizes: Integers) -> None:
        kept = random_numbers < self.threshold
        self._pairs += int(kept.sum())
        self._size += int(sizes[kept].sum())

    def side(self, index: int, weights: Sequence[float] | None = None) -> Iterator[str]:
        """The source (0) or target (1) texts of the sample. With `weights` of the corpora, each text occurs
        so many times on average; both sides have the same pairs."""
        lines = zip(self._random_numbers, self._files[index].lines(), strict=True)
        for corpus, pairs in self._corpora:
            weight = 1.0 if weights is None else weights[corpus]
            for number, line in islice(lines, pairs):
                if number < self.threshold:
                    text = line[:-1].decode().replace("\0", "\n")
                    yield from repeat(text, int(weight + number / self.threshold))

    def sizes(self, corpora: int) -> list[int]:
        """The number of pairs in the sample of each of the corpora."""
        indices, counts = np.array(self._corpora, np.int64).reshape(-1, 2).T
        kept = np.frombuffer(self._random_numbers, np.uint32) < self.threshold
        sizes: list[int] = np.bincount(np.repeat(indices, counts)[kept], minlength=corpora).tolist()
        return sizes

    def pairs(self) -> Iterator[Pair]:
        """The pairs of the sample."""
        return map(Pair, self.side(0), self.side(1))


class HoldoutCandidate(NamedTuple):
    """A pair that may be held out."""

    digest: bytes  # of source, seed, and the direction if it is not the one of `data`
    corpus: int  # index, from 0
    number: int  # of the pair in its corpus
    source: str
    target: str


def draw_candidates(
    block: Block, corpus: int, key: str, count: int, max_digest: bytes
) -> list[HoldoutCandidate]:
    """At most `count` pairs of a block that may be held out: the smallest digests up to `max_digest`. The
    digest of a source depends on `key`, which contains the seed."""
    if not count:
        return []
    found: dict[bytes, HoldoutCandidate] = {}
    for number, source, target in zip(block.numbers, block.sources, block.targets, strict=True):
        digest = blake2b(f"{key} {source}".encode(), digest_size=16).digest()
        if digest <= max_digest and digest not in found and not (is_blank(source) or is_blank(target)):
            found[digest] = HoldoutCandidate(digest, corpus, number, source, target)
    return heapq.nsmallest(count, found.values())


class HoldoutSampler:
    """Draws `count` pairs; those of a direction have distinct sources, and each source is equally likely.

    They are the pairs with the smallest digests. If the corpus grows, no pair that was in it
    before becomes held out; if it shrinks, only the missing held-out pairs are replaced.
    """

    def __init__(self, count: int):
        self._count, self.max_digest = count, ANY_DIGEST  # pairs with a larger digest are not drawn
        self._drawn: dict[bytes, HoldoutCandidate] = {}  # by digest, the first pair of each source

    def add(self, candidates: Iterable[HoldoutCandidate]) -> None:
        """Consider the candidates of the next block."""
        for candidate in candidates:
            self._drawn.setdefault(candidate.digest, candidate)
        if len(self._drawn) > 2 * self._count + CANDIDATES:
            self._drawn = {each.digest: each for each in self._smallest()}
            self.max_digest = max(self._drawn)

    def pairs(self, corpora: int) -> list[list[Pair]]:
        """The pairs that were drawn from each of the corpora, in their order."""
        drawn: list[list[Pair]] = [[] for _ in range(corpora)]
        for each in sorted(self._smallest(), key=lambda each: each.number):
            drawn[each.corpus].append(Pair(each.source, each.target))
        return drawn

    def _smallest(self) -> Sequence[HoldoutCandidate]:
        return heapq.nsmallest(self._count, self._drawn.values())
