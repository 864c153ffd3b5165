"""Generates parallel text of any size, to measure how mtrain handles large corpora.

    python scripts/generate_pairs.py PAIRS SOURCE TARGET [--seed N]

The words of two artificial languages are made of syllables; some have letters outside ASCII. The frequencies
of words follow Zipf's law, and a sentence has 18 words on average, about 25 tokens. Each source word has one
translation, and some words swap places with the next one, so that a model can learn to translate. Files whose
names end in .gz are compressed. The same arguments always produce the same text, and the text of a smaller
number of pairs is the beginning of a larger corpus.
"""

import argparse
import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedIOBase
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

WORDS = 200_000  # in each language, the most frequent ones first
BLOCK = 50_000  # pairs generated at a time
WORDS_PER_SENTENCE, SPREAD, LONGEST = 18.0, 0.6, 150  # mean; sigma of the logarithm
NUMBERS = 20  # one word of this many is a number
SYLLABLES = [
    [onset + vowel + coda for onset, vowel, coda in product(*(table.split("|") for table in tables))]
    for tables in (
        ("b|c|d|f|g|h|k|l|m|n|p|r|s|t|w|br|ch|st|tr", "a|e|i|o|u|ea|ou|é", "|n|s|t|r"),
        ("b|d|f|g|h|k|l|m|n|p|r|s|t|w|z|sch|st|ß", "a|e|i|o|u|ä|ö|ü|ei|ie", "|n|s|r|cht"),
    )
]
ENDS = (".\n", "?\n", "!\n", " – “ok”.\n")  # the same on both sides
END_RATES = 0.85, 0.08, 0.05, 0.02
Array = npt.NDArray[np.int64]


def lexicon(language: int, generator: np.random.Generator) -> pa.Array:
    """The words of a language after a space, then capitalized without one, then the ends of sentences."""

    sizes = 1 + np.log10(1 + np.arange(WORDS)) / 3 + generator.random(WORDS) / 2
    ends = np.cumsum(sizes.astype(np.int64)).tolist()
    parts = [SYLLABLES[language][i] for i in generator.integers(0, len(SYLLABLES[language]), ends[-1])]
    words = ["".join(parts[start:end]) for start, end in pairwise([0, *ends])]
    words[::NUMBERS] = [str(7 * i + 2) for i in range(len(words[::NUMBERS]))]  # the same on both sides
    return pa.array([*(f" {word}" for word in words), *map(str.capitalize, words), *ENDS])


def pairs(count: int, seed: int) -> Iterator[tuple[bytes, bytes]]:
    """Blocks of source and target sentences, `count` pairs in total."""
    languages = [lexicon(language, np.random.default_rng([seed, language])) for language in (0, 1)]
    shares = 1 / (np.arange(WORDS) + 2.7)  # Zipf and Mandelbrot
    table = np.cumsum(shares / shares.sum())
    for first in range(0, count, BLOCK):
        generator = np.random.default_rng([seed, 2, first])
        mean = np.log(WORDS_PER_SENTENCE) - SPREAD**2 / 2
        lengths = np.clip(generator.lognormal(mean, SPREAD, BLOCK), 1, LONGEST).astype(np.int64)
        ends = generator.choice(len(ENDS), BLOCK, p=END_RATES) + 2 * WORDS
        words = np.minimum(np.searchsorted(table, generator.random(lengths.sum())), WORDS - 1)
        size = min(BLOCK, count - first)
        lengths, ends = lengths[:size], ends[:size]
        words = words[: lengths.sum()]
        sides = (words, swapped(words, lengths))
        taken = [languages[i].take(pa.array(with_ends(sides[i], lengths, ends))) for i in (0, 1)]
        # What an array of strings contains lies one after another in memory.
        source, target = (array.buffers()[2].to_pybytes() for array in taken)
        yield source, target


def swapped(words: Array, lengths: Array) -> Array:
    """The order of words in the target: every third kind of word at an even position follows the next one."""
    places = np.arange(len(words)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    last = np.repeat(lengths, lengths) - 1
    moved = np.flatnonzero((places % 2 == 0) & (places < last) & (words % 3 == 0))
    order = np.arange(len(words))
    order[moved], order[moved + 1] = moved + 1, moved
    return words[order]


def with_ends(words: Array, lengths: Array, ends: Array) -> Array:
    """The pieces of sentences: words, the first one capitalized, and an end."""
    stops = np.cumsum(lengths)
    words = words.copy()
    words[stops - lengths] += WORDS
    return np.insert(words, stops, ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=int, metavar="PAIRS", help="number of pairs")
    for name in ("source", "target"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help=f"file of the {name} sentences")
    parser.add_argument("--seed", type=int, default=1, help="of the languages and the sentences (default: 1)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        files = [stack.enter_context(open_file(path)) for path in (arguments.source, arguments.target)]
        for block in pairs(arguments.pairs, arguments.seed):
            for file, text in zip(files, block, strict=True):
                file.write(text)


def open_file(path: Path) -> BufferedIOBase:
    """A file to write to, compressed if its name ends in .gz."""
    # Without the time, so that the same text makes the same file.
    return gzip.GzipFile(path, "wb", 1, mtime=0) if path.suffix == ".gz" else path.open("wb")


if __name__ == "__main__":
    main()
