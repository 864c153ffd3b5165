"""Splitting the input into windows of lines, and lines into parts: all lines, or only too long ones."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, tee
from typing import NamedTuple

import regex  # supports Unicode properties
from sentencex import segment

from mtrain.config.languages import base_language, split_tag
from mtrain.config.sections.decoding import SplitMode
from mtrain.decoding.alignment import NO_WORDS, Words, words_at
from mtrain.errors import DataError, UsageError
from mtrain.invisible_characters import is_blank
from mtrain.tokenizer.tokenizer import TagIds, Tokenizer, valid_text

log = logging.getLogger(__name__)

LINE_BREAK = re.compile("(\r?\n)")
# The ends of Khmer sentences, which sentencex does not know. "។ល។" means "etc.".
_KHMER_END = regex.compile(
    r"(?V1)(?<=[\u17d4\u17d5][\p{Pe}\p{Pf}]*\s*)(?![\s\p{Pe}\p{Pf}\u17d4\u17d5]|ល\u17d4|\Z)"
)
_SPACE_BEFORE_STOP = re.compile(r"[^\S\x00-\x7f](?=\.)")

_BLOCK = 10_000  # maximum characters of a line that is not split, to bound memory
_SEGMENTED = 4000  # characters that sentencex divides at a time, which takes milliseconds
# Markup that belongs to the sentence before it: end tags, and placeholders such as `[X1X]` and `{0}`.
_CLOSING = re.compile(r"(?:</[^<>]*>|\[\w+\]|\{\w*\})+\s*")
_CONTEXT = 1000  # characters at the end of a block, whose sentences may continue in the next one
# Lines that are read, sorted by length and translated together. On a CPU, larger windows gain no speed,
# except with many workers; see `Workers.lines_needed`.
WINDOW = 4096
FIRST_WINDOW = 256  # lines of the first window of a stream; full windows double, so output starts early
WINDOW_CHARACTERS = 1_000_000  # maximum characters of `WINDOW` lines, so that long lines form smaller windows

Paused = Callable[[float], bool]  # see `windows`


def windows(
    lines: Iterable[str], prefixes: Iterable[str] | None, most: int, paused: Paused = lambda waited: False
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield windows of at most `most` lines, with the prefixes of their translations, if any.

    A window is smaller if its lines are long (see `WINDOW_CHARACTERS`), or if `paused(waited)` is true after
    a line. `waited` is the time in seconds since the first line of the window was read. Unpaired surrogates
    are replaced; see `valid_text`.

    Raises UsageError if there are more or fewer prefixes than lines. A DataError of `lines` or `prefixes` is
    raised after a window with the lines before it.
    """
    texts: list[str] = []
    beginnings: list[str] = []
    size = 0  # characters
    started = 0.0
    rest = None if prefixes is None else iter(prefixes)
    wanted = most if isinstance(lines, list) else min(FIRST_WINDOW, most)
    most_characters = WINDOW_CHARACTERS * max(1, most // WINDOW)
    try:
        for text in lines:
            if not isinstance(text, str):
                raise TypeError("texts must be strings")
            if not texts:
                started = time.monotonic()
            if rest is not None:
                if (beginning := next(rest, rest)) is rest:
                    raise UsageError("fewer prefixes than lines; give one for each line (it may be empty)")
                if not isinstance(beginning, str):
                    raise TypeError("prefixes must be strings")
                beginnings.append(valid_text(beginning))
                size += len(beginning)
            texts.append(valid_text(text))
            size += len(text)
            is_full = len(texts) >= wanted or size >= most_characters
            if is_full or paused(time.monotonic() - started):
                yield texts, beginnings
                if len(texts) >= wanted:
                    wanted = min(2 * wanted, most)
                texts, beginnings = [], []
                size = 0
        if rest is not None and next(rest, rest) is not rest:
            raise UsageError("more prefixes than lines; give one for each line (it may be empty)")
    except DataError:
        if texts:
            yield texts, beginnings
        raise
    if texts:
        yield texts, beginnings


def windows_of_pairs(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield windows of sources and of their targets, as `windows` does."""
    ours, theirs = tee(pairs)
    return windows((source for source, _ in ours), (target for _, target in theirs), WINDOW)


class PrefixError(DataError, exit_code=3):
    """The translation of a line cannot begin with its prefix."""

    def __init__(self, index: int, reason: str):
        """`index` is the 0-based index in the whole input of the line, or of the first line of a text."""
        self.index, self.reason = index, reason
        super().__init__(f"line {index + 1} of the input {reason}")


class Part(NamedTuple):
    """The unit of decoding: a line, or one of the parts of a line that is split."""

    line: int  # index of the line in its window
    source: list[int]  # ids, ending in EOS, or in the code of a language after it
    prefix: list[int]  # ids that its translation begins with
    key: tuple[int, int]  # seeds sampling: index of the line in the whole input, of the part in the line
    # For alignments: the words of the line for each source id except EOS; `NO_WORDS` for a language tag.
    words: tuple[Words, ...] = ()
    target_lang: str | None = None  # if the line has a language tag of its own


class _Line(NamedTuple):
    """A line of a text."""

    owner: int  # index of the text in its window
    whole: str  # as given
    text: str  # without its language tag
    tag: list[int]  # ids of the tag
    target_lang: str | None  # that the tag names


class Splitter(NamedTuple):
    """Splits texts into lines, and lines of a language into parts of at most `longest` tokens each, including
    EOS. Each part has the ids of the languages `tags`, or of a tag that the line begins with. A tag must not
    name another language on a side, source or target, that is `chosen`. A prefix must leave room for another
    token in the `positions` of the target, if these are limited."""

    tokenizer: Tokenizer
    longest: int
    language: str
    mode: SplitMode = "long"  # `decoding.split`
    tags: TagIds = TagIds()
    chosen: tuple[bool, bool] = (False, False)
    positions: int | None = None

    def parts_of(
        self, texts: Sequence[str], prefixes: Sequence[str], first: int, alignments: bool = False
    ) -> list[Part]:
        """The parts of all lines of a window of texts; none for an empty line. With `alignments`, `words` are
        set.

        `first` is the index of the first line in the whole input. Raises PrefixError if a prefix is too long,
        or if its text has several parts: it is unclear which part the prefix belongs to. Raises UsageError if
        a language tag contradicts the chosen one.
        """
        lines = list(self._lines_of(texts, first))
        prefix_ids = self.tokenizer.encode_target(list(prefixes)) if prefixes else [[]] * len(texts)
        split = self._split_lines([line.text for line in lines])
        parts: list[Part] = []
        for index, (line, (is_whole, of_line)) in enumerate(zip(lines, split, strict=True)):
            filled = list(filter(None, of_line))
            words: list[tuple[Words, ...]] = [()] * len(filled)
            if alignments and filled:
                words = self._words(line, is_whole, filled)
            for number, (part, of_part) in enumerate(zip(filled, words, strict=True)):
                prefix, key = [*self.tags.target, *prefix_ids[line.owner]], (first + index, number)
                source = self._whole([*line.tag, *part])
                parts.append(Part(index, source, prefix, key, of_part, line.target_lang))
        owners = [line.owner for line in lines]
        for owner, count in Counter(owners[part.line] for part in parts).items():
            if not prefix_ids[owner]:
                continue
            tokens, index = len(self.tags.target) + len(prefix_ids[owner]), first + owners.index(owner)
            if self.positions is not None and tokens >= self.positions:
                fault = f"has a prefix of {tokens} tokens, but the model has only {self.positions} positions"
                raise PrefixError(index, fault)
            if count > 1:
                cure = "give the parts as lines of their own, or leave the prefix empty"
                raise PrefixError(index, f"has a prefix but is translated in {count} parts; {cure}")
        return parts

    def encode(self, texts: Sequence[str], first: int = 0, most: int | None = None) -> list[list[int]]:
        """The source ids of texts without splitting them, with language tags and EOS, cut to at most `most`
        ids. `first` is the index of the first text in the whole input."""
        tagged = [self._tag_of(text, number) for number, text in enumerate(texts, first + 1)]
        rows = self.tokenizer.encode_source([text for _, text, _ in tagged])
        return [self._whole([*tag, *ids], most) for (tag, *_), ids in zip(tagged, rows, strict=True)]

    def encode_target(self, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
        """The target ids of texts, with the code of their language if the model uses codes, and EOS, cut to
        at most `most` ids."""
        rows, end = self.tokenizer.encode_target(list(texts)), None if most is None else most - 1
        return [[*[*self.tags.target, *ids][:end], self.tokenizer.special.eos] for ids in rows]

    def _whole(self, ids: Sequence[int], most: int | None = None) -> list[int]:
        """Source ids with EOS and what follows it, cut to at most `most` ids."""
        after = [self.tokenizer.special.eos, *self.tags.after_source]
        return [*ids[: None if most is None else most - len(after)], *after]

    def _lines_of(self, texts: Sequence[str], first: int) -> Iterator[_Line]:
        number = first
        for owner, text in enumerate(texts):
            for whole in LINE_BREAK.split(text)[::2] if "\n" in text else [text]:
                number += 1
                tag, rest, target_lang = self._tag_of(whole, number)
                yield _Line(owner, whole, rest, tag, target_lang)

    def _tag_of(self, text: str, number: int) -> tuple[list[int], str, str | None]:
        """The ids of the language tag of a line, by default of `self.tags`, the line without it, and the
        target language that the tag of the line names."""
        own = list(self.tags.source)
        for tag in self.tokenizer.source.marian_tags if text.startswith(">>") else ():
            if text.startswith(tag):
                return own, text, tag[2:-2]  # the vocabulary encodes the tag
        language, rest = split_tag(text.lstrip()) if own else (None, text)
        if language is None:
            return own, text, None
        given = text.removesuffix(rest).split()
        names = {i: self.tokenizer.source.pieces[i] for i in self.tokenizer.source.symbols}
        default = [names[i] for i in own if i in names]
        if len(given) > len(default) or not set(given) <= set(names.values()):  # not the tag of a language
            return own, text, None
        missing = default[: len(default) - len(given)]  # the source language
        sides = zip(self.chosen[-len(default) :], [*missing, *given], default, strict=True)
        if any(is_chosen and one != other for is_chosen, one, other in sides):
            found = f"line {number} begins with {' '.join(given)}, but {' '.join(default)} was chosen"
            raise UsageError(f"{found}; remove the tag of the line, or choose no languages")
        return self.tokenizer.tag_ids(" ".join([*missing, *given])), rest, language

    def _words(self, line: _Line, is_whole: bool, parts: list[list[int]]) -> list[tuple[Words, ...]]:
        """`Part.words` of the parts of a line."""
        source, positions = self.tokenizer.source, []
        end = len(line.whole) - len(line.text)
        sentences = [line.text] if is_whole else self._sentences(line.text)
        for sentence, begins in zip(sentences, source.positions(sentences), strict=True):
            start = max(end, line.whole.find(sentence, end))
            positions += [start + begin for begin in begins]
            end = start + len(sentence)
        words = words_at(line.whole, positions)
        repeated = words[: len(source.tag(source.encode(sentences[:1])[0]))]  # see `split_line`
        rest, added = iter(words[len(repeated) :]), [NO_WORDS] * len(line.tag)
        return [(*added, *repeated, *islice(rest, len(part) - len(repeated))) for part in parts]

    def _split_lines(self, texts: Sequence[str]) -> Iterator[tuple[bool, list[list[int]]]]:
        """The source ids of the parts of each line, and whether the line was encoded as a whole."""
        texts = ["" if is_blank(text) else text for text in texts]
        if self.mode == "sentences":
            sentences = [self._sentences(text) for text in texts]
            encoded = iter(self.tokenizer.encode_source([text for line in sentences for text in line]))
            yield from ((False, self._fit([next(encoded) for _ in line])) for line in sentences)
            return
        split = 0
        whole = self.tokenizer.encode_source([text if len(text) <= _BLOCK else "" for text in texts])
        for text, ids in zip(texts, whole, strict=True):
            fits = len(ids) <= self._most_ids and len(text) <= _BLOCK
            parts = [ids] if fits else self.split_line(text)
            split += len(parts) > 1
            yield fits, parts
        if split:
            message = "%d line(s) exceed the limit of %d tokens and were translated in parts"
            log.warning(message, split, self.longest)

    @property
    def _most_ids(self) -> int:
        """The number of ids that a part may have without language tag and EOS."""
        return self.longest - len(self.tags.source) - len(self.tags.after_source) - 1

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
        parts = [[*symbols, *part] for ids in sentences for part in _cut(ids, self.tokenizer, longest)]
        return parts or [symbols]

    def _sentences(self, text: str) -> list[str]:
        """The sentences of a text, at least one; see `_segment`."""
        found = _segment(base_language(self.language), text)
        if "\u17d4" in text or "\u17d5" in text:
            found = chain.from_iterable(map(_KHMER_END.split, found))
        sentences: list[str] = []
        for each in found:
            markup = _CLOSING.match(each)
            if markup and sentences and not sentences[-1][-1:].isspace():
                sentences[-1] += markup[0]
                each = each[markup.end() :]
            sentences += [each] if each else []
        return sentences or [text]


def _segment(language: str, text: str) -> Iterator[str]:
    """The sentences of a text. It is divided in blocks of at most `_SEGMENTED` characters, because the time
    of sentencex is quadratic in the length; a sentence that is longer than a block is cut, after a space if
    possible. White space outside ASCII before a full stop would crash sentencex, so it gets a space."""
    start = 0
    while start < len(text):
        block = text[start : start + _SEGMENTED]
        sentences = list(segment(language, _SPACE_BEFORE_STOP.sub(" ", block))) or [block]
        if start + len(block) < len(text):  # the last sentences may continue, or be within quotation marks
            ends = accumulate(map(len, sentences))
            known = [each for each, end in zip(sentences, ends, strict=True) if end <= len(block) - _CONTEXT]
            sentences = known or sentences[:-1][:1] or [block[: block.rfind(" ", 1) + 1] or block]
        for sentence in sentences:
            yield text[start : start + len(sentence)]
            start += len(sentence)


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
