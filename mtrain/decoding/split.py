"""Splitting the input into windows of lines, and lines that are too long for the model into parts."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mtrain.errors import UsageError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The end of a sentence, including closing quotes or brackets. Not if a lowercase letter follows, or after an
# abbreviation of one or two letters, as in "Mr. Smith". Chinese and Japanese have no space after a sentence.
_SENTENCE_END = re.compile(
    r"""(?:(?<!\b[A-Z][a-z])(?<!\b[A-Z])\.|[!?…])["'”’»)\]]*\s+(?=[^a-z\s])|[。！？]+"""
)
_BLOCK = 10_000  # maximum characters that are segmented at a time, to bound memory
# Lines that are read, sorted by length and translated before the next are read. Larger windows gain no speed,
# except with many workers: they wait for each other at the end of a window, so each needs many batches of it.
WINDOW = 4096
WINDOW_PER_WORKER = 2048  # lines
FIRST_WINDOW = 256  # lines of the first window of a stream; later windows double, so output starts early
WINDOW_CHARACTERS = 1_000_000  # maximum characters of `WINDOW` lines, so that long lines form smaller windows


def windows(
    lines: Iterable[str], prefixes: Iterable[str] | None, most: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield windows of lines and the prefixes of their translations, if any: at most `most` lines each, fewer
    if they are long (see `WINDOW_CHARACTERS`).

    Raises UsageError if there are more or fewer prefixes than lines.
    """
    texts: list[str] = []
    beginnings: list[str] = []
    size, rest = 0, None if prefixes is None else iter(prefixes)
    wanted = most if isinstance(lines, list) else min(FIRST_WINDOW, most)
    most_characters = WINDOW_CHARACTERS * max(1, most // WINDOW)
    for text in lines:
        if not isinstance(text, str):
            raise TypeError("texts must be strings")
        texts.append(text)
        if rest is not None:
            beginning = next(rest, None)
            if beginning is None:
                raise UsageError("fewer prefixes than lines; give one for each line (it may be empty)")
            beginnings.append(beginning)
            size += len(beginning)
        size += len(text)
        if len(texts) >= wanted or size >= most_characters:
            yield texts, beginnings
            texts, beginnings, size, wanted = [], [], 0, min(2 * wanted, most)
    if rest is not None and next(rest, None) is not None:
        raise UsageError("more prefixes than lines; give one for each line (it may be empty)")
    if texts:
        yield texts, beginnings


class Part(NamedTuple):
    """The unit of decoding: a line, or one of the parts of a line that is too long for the model."""

    line: int  # index of the line in its window
    source: list[int]  # ids, ending in EOS
    prefix: list[int]  # ids that its translation begins with
    key: tuple[int, int]  # seeds sampling: index of the line in the whole input, of the part in the line


def parts_of(
    texts: Sequence[str],
    prefixes: Sequence[str],
    tokenizer: Tokenizer,
    longest: int,
    first: int,
    tag: Sequence[int] = (),
) -> list[Part]:
    """The parts of a window of lines, at most `longest` tokens each, including EOS; none for an empty line.

    The prefix of a line belongs to its first part. `first` is the index of the first line in the whole input.
    Each part begins with the ids of the language tag `tag`.
    """
    longest -= len(tag)
    encoded = tokenizer.encode_source([text if len(text) <= _BLOCK else "" for text in texts])
    starts = tokenizer.encode_target(list(prefixes)) if prefixes else [[]] * len(texts)
    parts, split = [], 0
    for line, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        fits = len(ids) < longest and len(text) <= _BLOCK
        of_line = [ids] if fits else split_line(text, tokenizer, longest - 1)
        split += len(of_line) > 1
        for number, part in enumerate(filter(None, of_line)):
            prefix = starts[line] if number == 0 else []
            parts.append(Part(line, [*tag, *part, tokenizer.special.eos], prefix, (first + line, number)))
    if split:
        log.warning(
            "%d line(s) exceed the model's %d tokens and were translated in parts", split, longest + len(tag)
        )
    return parts


def split_line(text: str, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Source ids of a text in parts of at most `longest` tokens. The parts are sentences, because most models
    are trained on sentences. A sentence that is too long is split between words, a word that is too long at
    any position. Symbols at the beginning of the text, such as a target-language tag, are repeated in each
    part."""
    encoded = tokenizer.encode_source(list(_sentences(text)))
    tag = tokenizer.source.tag(encoded[0])
    encoded[0] = encoded[0][len(tag) :]
    parts = (part for ids in encoded for part in _cut(ids, tokenizer, max(1, longest - len(tag))))
    return [[*tag, *part] for part in parts]


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a text; those longer than `_BLOCK` characters are split, after a space if possible."""
    start = 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        while end - start > _BLOCK:
            space = text.rfind(" ", start + 1, start + _BLOCK)
            cut = space + 1 if space > 0 else start + _BLOCK
            yield text[start:cut]
            start = cut
        yield text[start:end]
        start = end


def _cut(ids: list[int], tokenizer: Tokenizer, longest: int) -> Iterator[list[int]]:
    """Split ids into runs of at most `longest`, between words where possible."""
    starts, start = tokenizer.word_starts(ids), 0
    while len(ids) - start > longest:
        ends = range(start + longest, start, -1)
        end = next((i for i in ends if starts[i]), start + longest)
        yield ids[start:end]
        start = end
    if start < len(ids):
        yield ids[start:]
