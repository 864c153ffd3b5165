"""Splitting the input into windows of lines, and lines into parts: all lines, or those that are too long."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from sentencex import segment

from mtrain.config.decoding import Split
from mtrain.config.languages import base_language, split_tag
from mtrain.decoding.translation import LINE_BREAK
from mtrain.errors import DataError, UsageError
from mtrain.tokenizer.tokenizer import Tokenizer, valid_text

log = logging.getLogger(__name__)

_BLOCK = 10_000  # maximum characters that are segmented at a time, to bound memory
# Lines that are read, sorted by length and translated before the next are read. Larger windows gain no speed,
# except with many workers: they wait for each other at the end of a window, so each needs many batches of it.
WINDOW = 4096
WINDOW_PER_WORKER = 2048  # lines
FIRST_WINDOW = 256  # lines of the first window of a stream; full windows double, so output starts early
WINDOW_CHARACTERS = 1_000_000  # maximum characters of `WINDOW` lines, so that long lines form smaller windows


def windows(
    lines: Iterable[str],
    prefixes: Iterable[str] | None,
    most: int,
    paused: Callable[[float], bool] = lambda waited: False,
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield windows of lines and the prefixes of their translations, if any: at most `most` lines each, fewer
    if they are long (see `WINDOW_CHARACTERS`), or if `paused(waited)` is true after a line, where `waited` is
    the time in seconds since the first line of the window was read. Unpaired surrogates are replaced; see
    `valid_text`.

    Raises UsageError if there are more or fewer prefixes than lines. A DataError of `lines` or `prefixes` is
    raised after a window with the lines before it.
    """
    texts: list[str] = []
    beginnings: list[str] = []
    size, started, rest = 0, 0.0, None if prefixes is None else iter(prefixes)
    wanted = most if isinstance(lines, list) else min(FIRST_WINDOW, most)
    most_characters = WINDOW_CHARACTERS * max(1, most // WINDOW)
    try:
        for text in lines:
            if not isinstance(text, str):
                raise TypeError("texts must be strings")
            if not texts:
                started = time.monotonic()
            if rest is not None:
                beginning = next(rest, None)
                if beginning is None:
                    raise UsageError("fewer prefixes than lines; give one for each line (it may be empty)")
                beginnings.append(valid_text(beginning))
                size += len(beginning)
            texts.append(valid_text(text))
            size += len(text)
            is_full = len(texts) >= wanted or size >= most_characters
            if is_full or paused(time.monotonic() - started):
                yield texts, beginnings
                if len(texts) >= wanted:
                    wanted = min(2 * wanted, most)
                texts, beginnings, size = [], [], 0
        if rest is not None and next(rest, None) is not None:
            raise UsageError("more prefixes than lines; give one for each line (it may be empty)")
    except DataError:
        if texts:
            yield texts, beginnings
        raise
    if texts:
        yield texts, beginnings


class Part(NamedTuple):
    """The unit of decoding: a line, or one of the parts of a line that is split."""

    line: int  # index of the line in its window
    source: list[int]  # ids, ending in EOS
    prefix: list[int]  # ids that its translation begins with
    key: tuple[int, int]  # seeds sampling: index of the line in the whole input, of the part in the line
    added: int = 0  # words at the beginning of the source that the line does not have: a language tag


class Line(NamedTuple):
    """A line to translate, without its language tag."""

    tag: list[int]  # source ids before it
    text: str
    added: int  # words of the tag that the line did not have


class Splitter(NamedTuple):
    """Splits lines of a language into parts of at most `longest` tokens each, including EOS. Each part begins
    with the ids of the language tag `tag`, or of a tag that the line begins with; if the tag `is_chosen`, it
    is an error if they differ."""

    tokenizer: Tokenizer
    longest: int
    language: str
    mode: Split = "long"  # `decoding.split`
    tag: Sequence[int] = ()
    is_chosen: bool = False

    def parts_of(self, texts: Sequence[str], prefixes: Sequence[str], first: int) -> list[Part]:
        """The parts of all lines of a window of texts; none for an empty line.

        The prefix of a text belongs to its first part. `first` is the index of the first line in the whole
        input. Raises UsageError if a prefix has several lines, and the errors of `lines_of`.
        """
        lines: list[Line] = []
        owners: list[int] = []  # the texts that the lines belong to
        for owner, text in enumerate(texts):
            lines += self.lines_of(text, first + len(lines) + 1)
            owners += [owner] * (len(lines) - len(owners))
        if any("\n" in prefix.strip() for prefix in prefixes):
            raise UsageError("a prefix contains a line break; give the beginning of one line")
        prefix_ids = dict(enumerate(self.tokenizer.encode_target(list(prefixes))))
        parts, eos = [], self.tokenizer.special.eos
        split = self._split_lines([line.text for line in lines])
        for index, (line, of_line) in enumerate(zip(lines, split, strict=True)):
            for number, part in enumerate(filter(None, of_line)):
                prefix, key = prefix_ids.pop(owners[index], []), (first + index, number)
                parts.append(Part(index, [*line.tag, *part, eos], prefix, key, line.added))
        return parts

    def encode(self, texts: Sequence[str], first: int = 0) -> list[list[int]]:
        """The source ids of texts that are not to be split, with language tags and without EOS. `first` is
        the index of the first text in the whole input."""
        tagged = [self._tag_of(text, list(self.tag), number) for number, text in enumerate(texts, first + 1)]
        rows = self.tokenizer.encode_source([text for _, text in tagged])
        return [[*tag, *ids] for (tag, _), ids in zip(tagged, rows, strict=True)]

    def lines_of(self, text: str, number: int) -> list[Line]:
        """The lines of a text, of which the first has a number, from 1. The tag, or other symbols, that a
        line begins with are also those of the next lines that have none. Raises UsageError if its language
        tag contradicts the chosen one."""
        pattern, symbols, tag = self.tokenizer.source.symbol_pattern, "", list(self.tag)
        lines = []
        for index, whole in enumerate(LINE_BREAK.split(text)[::2]):
            tag, line = self._tag_of(whole, tag, number + index)
            if pattern and (found := re.match(rf"(?:\s*(?:{pattern.pattern}))+", line, pattern.flags)):
                symbols = f"{found[0].strip()} "
            elif line.strip():
                line = symbols + line
            tag_words = sum(self.tokenizer.word_starts(tag))
            lines.append(Line(tag, line, tag_words + len(line.split()) - len(whole.split())))
        return lines

    def _tag_of(self, text: str, tag: list[int], number: int) -> tuple[list[int], str]:
        """The ids of the language tag of a line, by default `tag`, and the line without it."""
        language, rest = split_tag(text.lstrip()) if tag else (None, text)
        if language is None:
            return tag, text
        given = text.removesuffix(rest).split()
        names = {i: self.tokenizer.source.pieces[i] for i in self.tokenizer.source.symbols}
        default = [names[i] for i in tag if i in names]
        if len(given) > len(default) or not set(given) <= set(names.values()):  # not the tag of a language
            return tag, text
        missing = default[: len(default) - len(given)]  # the source language
        if self.is_chosen and [*missing, *given] != default:
            found = f"line {number} begins with {' '.join(given)}, but {' '.join(default)} was chosen"
            raise UsageError(f"{found}; remove the tag of the line, or do not choose languages")
        return self.tokenizer.tag_ids(" ".join([*missing, *given])), rest

    def _split_lines(self, texts: Sequence[str]) -> Iterator[list[list[int]]]:
        """The source ids of the parts of each line."""
        if self.mode == "sentences":
            sentences = [self._sentences(text) for text in texts]
            encoded = iter(self.tokenizer.encode_source([text for line in sentences for text in line]))
            yield from (self._fit([next(encoded) for _ in line]) for line in sentences)
            return
        split = 0
        whole = self.tokenizer.encode_source([text if len(text) <= _BLOCK else "" for text in texts])
        for text, ids in zip(texts, whole, strict=True):
            fits = len(ids) <= self._most_ids and len(text) <= _BLOCK
            parts = [ids] if fits else self.split_line(text)
            split += len(parts) > 1
            yield parts
        if split:
            message = "%d line(s) exceed the model's %d tokens and were translated in parts"
            log.warning(message, split, self.longest)

    @property
    def _most_ids(self) -> int:
        """The number of ids that a part may have without language tag and EOS."""
        return self.longest - len(self.tag) - 1

    def split_line(self, text: str) -> list[list[int]]:
        """Source ids of a text in parts, without language tag and EOS. The parts are sentences, because most
        models are trained on sentences. A sentence that is too long is split between words, a word that is
        too long at any position. Symbols at the beginning of the text, such as another tag, are repeated in
        each part."""
        return self._fit(self.tokenizer.encode_source(self._sentences(text)))

    def _fit(self, sentences: list[list[int]]) -> list[list[int]]:
        """The parts of a line, given the ids of its sentences."""
        first, *others = sentences
        symbols = self.tokenizer.source.tag(first)
        sentences = [first[len(symbols) :], *others]
        longest = max(1, self._most_ids - len(symbols))
        return [[*symbols, *part] for ids in sentences for part in _cut(ids, self.tokenizer, longest)]

    def _sentences(self, text: str) -> list[str]:
        """The sentences of a text, at least one; those longer than `_BLOCK` characters are split, after a
        space if possible."""
        sentences = []
        for sentence in segment(base_language(self.language), text):
            start = 0
            while len(sentence) - start > _BLOCK:
                space = sentence.rfind(" ", start + 1, start + _BLOCK)
                end = space + 1 if space > 0 else start + _BLOCK
                sentences.append(sentence[start:end])
                start = end
            sentences.append(sentence[start:])
        return sentences or [text]


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
