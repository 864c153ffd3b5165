"""Candidates for the pieces of a unigram vocabulary, from which SentencePiece removes the least useful ones.

The candidates that SentencePiece 0.2.3 finds by itself are poor. They are the strings of bytes that are
followed by two different bytes in the text. A word that is always followed by a space is therefore missing.
In scripts whose letters begin with the same byte in UTF-8 (Ethiopic, Georgian, Thai, the scripts of India),
nearly all strings are. In version 0.2.1, such words are missing, too; in version 0.2.2, they are not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import regex

from mtrain.tokenizer.code_points import code_points
from mtrain.tokenizer.vocabulary import SPACE, make_normalizer

LONGEST = 16  # characters of a piece: the default of SentencePiece
# Of the distinct words, to bound memory (about 50 bytes for each). Only text without spaces has more of them.
_CHARACTERS = 20_000_000
_BATCH = 10_000  # sentences that are normalized at a time
# Characters that pieces cannot have: line ends and tabs separate candidates in the file, and SentencePiece
# reserves the others.
_SEPARATORS = np.array([ord(character) for character in "\0\t\n\r\x1f\u2585"])
# Digits of a script, such as Thai ones, or other characters. SentencePiece separates digits only from letters
# of another script, such as ASCII digits from Latin letters.
_RUN = regex.compile(rf"(?V1){SPACE}?[\p{{Nd}}&&\P{{Script=Common}}]+|[\P{{Nd}}||\p{{Script=Common}}]+")
Integers = npt.NDArray[np.int64]


def write_seeds(sentences: Iterable[str], normalization: str, count: int, file: Path) -> None:
    """Write candidates for pieces to `file`, in the format of SentencePiece's `seed_sentencepieces_file`.

    The candidates are the strings of 2 to `LONGEST` characters within words that occur at least twice, except
    for mixtures of digits of a script and other characters. At most `count` are written, and those that cover
    the most text come first. SentencePiece ignores candidates that its other settings rule out.
    """
    words = _choose(_count_words(sentences, normalization))
    runs = [(run, count) for word, count in words.items() for run in _RUN.findall(word)]
    text = "\0".join([*(run for run, _ in runs), ""])
    # The characters as small numbers, where 0 separates words.
    alphabet, letters = np.unique(code_points(text), return_inverse=True)
    letters[np.isin(alphabet, _SEPARATORS)[letters]] = 0
    sizes = np.array([len(run) + 1 for run, _ in runs], np.int64)
    found = _find_repeated(letters, np.repeat([count for _, count in runs], sizes))
    starts, counts, lengths = map(np.concatenate, zip(*found, strict=True))
    best = np.argsort(-counts * lengths, kind="stable")[:count]
    with file.open("w", encoding="utf-8", newline="\n") as stream:
        for start, length, number in zip(starts[best], lengths[best], counts[best], strict=True):
            stream.write(f"{text[start : start + length]}\t{number}\n")


def _count_words(sentences: Iterable[str], normalization: str) -> Counter[str]:
    """How often each word occurs, with the mark of a space before it, as SentencePiece sees it."""
    words = Counter[str]()
    normalizer = make_normalizer(normalization)
    rest = iter(sentences)
    while texts := list(islice(rest, _BATCH)):
        if normalizer is not None:
            texts = normalizer.normalize(texts)
        for text in texts:
            words.update(SPACE + word for word in text.split(" ") if word)
    return words


def _choose(words: Counter[str]) -> dict[str, int]:
    """All words, or if they are too long in total, some of them, evenly distributed over the text."""
    step = -(-sum(map(len, words)) // _CHARACTERS) or 1
    return dict(list(words.items())[::step])


def _find_repeated(letters: Integers, weights: Integers) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Yield the strings of each length up to `LONGEST` that occur at least twice in a text of `letters`: one
    place of each, their counts and their lengths. The string at a place is counted with its weight."""
    size = int(letters.max(initial=0)) + 1
    starts = np.flatnonzero(letters)
    strings = letters[starts]  # the string at each start, as a number
    for length in range(2, LONGEST + 1):
        following = letters[starts + length - 1]
        inside = following > 0
        starts = starts[inside]
        _, first, strings = np.unique(
            strings[inside] * size + following[inside], return_index=True, return_inverse=True
        )
        counts = np.bincount(strings, weights[starts], minlength=len(first)).astype(np.int64)
        are_repeated = counts > 1
        places = starts[first[are_repeated]]
        yield places, counts[are_repeated], np.full(len(places), length)
        # No longer string that begins with a rare one is repeated.
        kept = are_repeated[strings]
        starts = starts[kept]
        strings = strings[kept]
