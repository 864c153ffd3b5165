"""What is translated at a time: a line, or parts of a line that is longer than the model's limit."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mtrain.errors import UsageError
from mtrain.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# What ends a sentence, with closing quotes or brackets, if no lower-case letter follows and no short word
# came before, as in "Mr. Smith"; in Chinese and Japanese no space follows.
_SENTENCE_END = re.compile(
    r"""(?:(?<!\b[A-Z][a-z])(?<!\b[A-Z])\.|[!?…])["'”’»)\]]*\s+(?=[^a-z\s])|[。！？]+"""
)
_BLOCK = 10_000  # characters of a line that are segmented at a time: memory does not grow with the line
WINDOW = 4096  # lines that are read, sorted by length and translated before the next are read
FIRST_WINDOW = 256  # lines of a stream; windows double from there on, so that answers begin early
WINDOW_CHARACTERS = 1_000_000  # a window of long lines has fewer of them


def windows(
    lines: Iterable[str], prefixes: Iterable[str] | None, most: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Lines, and the prefixes of their translations if there are any, up to `most` lines at a time, or as
    many as hold `WINDOW_CHARACTERS`. Raises UsageError if there are not as many prefixes as lines."""
    texts: list[str] = []
    begins: list[str] = []
    size, rest = 0, None if prefixes is None else iter(prefixes)
    wanted = most if isinstance(lines, list) else min(FIRST_WINDOW, most)
    for text in lines:
        if not isinstance(text, str):
            raise TypeError("texts must be strings")
        texts.append(text)
        if rest is not None:
            begin = next(rest, None)
            if begin is None:
                raise UsageError("fewer prefixes than lines; give one for each line, or an empty one")
            begins.append(begin)
            size += len(begins[-1])
        size += len(text)
        if len(texts) >= wanted or size >= WINDOW_CHARACTERS:
            yield texts, begins
            texts, begins, size, wanted = [], [], 0, min(2 * wanted, most)
    if rest is not None and next(rest, None) is not None:
        raise UsageError("more prefixes than lines; give one for each line, or an empty one")
    if texts:
        yield texts, begins


class Part(NamedTuple):
    """A line, or a part of one."""

    line: int  # in its window
    source: list[int]  # ids, the last of which is EOS
    prefix: list[int]  # ids that its translation begins with
    key: tuple[int, int]  # number of the line in the whole input, and of the part in the line


def parts_of(
    texts: Sequence[str], prefixes: Sequence[str], tokenizer: Tokenizer, longest: int, first: int
) -> list[Part]:
    """The parts of a window of lines, none of an empty line; at most `longest` tokens each, EOS counted.

    The prefix of a line's translation is that of its first part. `first` is the number of the first line.
    """
    encoded = tokenizer.encode_source([text if len(text) <= _BLOCK else "" for text in texts])
    starts = tokenizer.encode_target(list(prefixes)) if prefixes else [[]] * len(texts)
    parts, split = [], 0
    for line, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        fits = len(ids) < longest and len(text) <= _BLOCK
        pieces = [ids] if fits else split_line(text, tokenizer, longest - 1)
        split += len(pieces) > 1
        for number, piece in enumerate(filter(None, pieces)):
            prefix = starts[line] if number == 0 else []
            parts.append(Part(line, [*piece, tokenizer.special.eos], prefix, (first + line, number)))
    if split:
        log.warning("%d line(s), longer than the model's %d tokens, were translated in parts", split, longest)
    return parts


def split_line(text: str, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Source ids of a text in parts of at most `longest` tokens each: its sentences, since most models know
    nothing else; a sentence that does not fit is cut between words, a word that does not fit anywhere. Each
    begins with the tag of the target language that the text begins with, if it does."""
    encoded = tokenizer.encode_source(list(_sentences(text)))
    tag = tokenizer.source.tag(encoded[0])
    encoded[0] = encoded[0][len(tag) :]
    parts = (part for ids in encoded for part in _cut(ids, tokenizer, max(1, longest - len(tag))))
    return [[*tag, *part] for part in parts]


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a text, those beyond `_BLOCK` characters cut, after a space if there is one."""
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
    """Runs of at most `longest` ids, each ending where a word does if one does at all."""
    starts, start = tokenizer.word_starts(ids), 0
    while len(ids) - start > longest:
        ends = range(start + longest, start, -1)
        end = next((i for i in ends if starts[i]), start + longest)
        yield ids[start:end]
        start = end
    if start < len(ids):
        yield ids[start:]
