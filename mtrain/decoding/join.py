"""Joining the translations of the parts of a line, and of the lines of a text."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, zip_longest

from mtrain.config.languages import sentence_separator
from mtrain.decoding.alignment import count_words, words_at
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.split import LINE_BREAK
from mtrain.decoding.translation import Translation


def count_lines(text: str) -> int:
    """The number of lines of a text, which are translated like separate texts."""
    return 1 + text.count("\n")


def join_texts(
    texts: Sequence[str], task: DecodingTask, found: Sequence[list[Translation]]
) -> Iterator[Translation]:
    """Yield the translation of each text of a window, given the translations `found` of the parts of the
    task."""
    penalty, space = task.config.length_penalty, sentence_separator(task.target_lang)
    parts_of_line: dict[int, list[list[Translation]]] = defaultdict(list)
    for part, of_part in zip(task.parts, found, strict=True):
        parts_of_line[part.line].append(of_part)
    empty = Translation("", 0.0, 0.0, 0, True, alignment=() if task.alignments else None)
    line = 0
    for text in texts:
        lines = range(line, line + count_lines(text))
        of_text = [_join_parts(parts_of_line.get(i, [[empty]]), task.n_best, space, penalty) for i in lines]
        yield _join_lines(of_text, text, task.n_best, penalty)
        line = lines.stop


def _join_parts(
    parts: Sequence[Sequence[Translation]], n_best: int, space: str, length_penalty: float
) -> Translation:
    """The translation of a line, given the best translations of each of its parts; the k-th best consists of
    their k-th best."""
    if len(parts) == 1:
        return _with_n_best(parts[0], n_best)
    columns = kth_best(parts)
    return _with_n_best([join(column, space, length_penalty) for column in columns], n_best)


def join(parts: Sequence[Translation], space: str, length_penalty: float) -> Translation:
    """The translation of a line from the translations of its parts, with `space` between them. The alignments
    of the parts have the words of the line as sources."""
    filled = [part for part in parts if part.text]
    text = space.join(part.text for part in filled)
    starts = accumulate((len(part.text) + len(space) for part in filled[:-1]), initial=0)
    # Without a space, the first word of a part is joined to the previous word.
    first_words = [first for first, _ in words_at(text, list(starts))] if filled else []
    alignment = [
        (source, first + target)
        for part, first in zip(filled, first_words, strict=True)
        for source, target in part.alignment or ()
    ]
    tokens = sum(part.tokens for part in parts)
    log_prob = sum(part.log_prob for part in parts)
    coverage = sum(part.score - part.log_prob / part.tokens**length_penalty for part in parts)
    score = log_prob / tokens**length_penalty + coverage
    finished = all(part.finished for part in parts)
    aligned = None if parts[0].alignment is None else tuple(dict.fromkeys(alignment))
    return Translation(text, score, log_prob, tokens, finished, aligned)


def _join_lines(lines: Sequence[Translation], text: str, n_best: int, length_penalty: float) -> Translation:
    """The translation of a text from the translations of its lines, with the same line breaks. The k-th best
    consists of the k-th best of each line."""
    if len(lines) == 1:
        return lines[0]
    columns = kth_best([line.n_best or (line,) for line in lines])
    return _with_n_best([_with_breaks(column, text, length_penalty) for column in columns], n_best)


def kth_best(ranked: Sequence[Sequence[Translation]]) -> Iterator[list[Translation]]:
    """Yield the best translations of several texts, then the second best ones, and so on. Where a text has
    fewer than others, its last one is repeated. Without texts, one empty list."""
    for k in range(max(map(len, ranked), default=1)):
        yield [found[min(k, len(found) - 1)] for found in ranked]


def _with_breaks(lines: Sequence[Translation], text: str, length_penalty: float) -> Translation:
    """The translations of the lines of a text, joined."""
    fields_of_text = LINE_BREAK.split(text)
    sources, breaks = fields_of_text[::2], fields_of_text[1::2]
    filled, words = [], 0
    for line, source in zip(lines, sources, strict=True):
        if line.alignment is not None:
            line = replace(line, alignment=tuple((words + i, j) for i, j in line.alignment))
        filled += [line] if line.tokens else []
        words += count_words(source)
    joined = join(filled, " ", length_penalty) if filled else lines[0]
    texts = [line.text for line in lines]
    return replace(joined, text="".join(chain.from_iterable(zip_longest(texts, breaks, fillvalue=""))))


def _with_n_best(translations: Sequence[Translation], n_best: int) -> Translation:
    """The best of the translations of a line, with all of them in its field `n_best` if `n_best` > 1."""
    return replace(translations[0], n_best=tuple(translations[:n_best])) if n_best > 1 else translations[0]
